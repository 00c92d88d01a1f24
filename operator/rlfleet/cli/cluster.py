"""The apiserver as a person reaches it: a kubeconfig or a pod's service account, plain JSON, own rights.

Invariant: every error names the object, the credentials that were used and the remedy; reads are repeated by whoever
calls, writes never.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from rlfleet.api import labels
from rlfleet.cli.failures import CliError, Exit
from rlfleet.client import credentials
from rlfleet.client.errors import ConfigError

Obj = dict[str, Any]

OURS = f"/apis/{labels.GROUP}/{labels.VERSION}"
CORE = "/api/v1"
#: Plural -> (prefix of its path, kind).
KINDS = {
    "rlpipelines": (OURS, "RLPipeline"),
    "enginepools": (OURS, "EnginePool"),
    "syncrounds": (OURS, "SyncRound"),
    "trainerdemands": (OURS, "TrainerDemand"),
    "pods": (CORE, "Pod"),
    "events": (CORE, "Event"),
    "nodes": (CORE, "Node"),
    "leases": ("/apis/coordination.k8s.io/v1", "Lease"),
    "deviceclasses": ("/apis/resource.k8s.io/v1", "DeviceClass"),
}
#: Kinds that are in no namespace.
_EVERYWHERE = ("nodes", "deviceclasses")
CALL_SECONDS = 15.0
_PAGE = 500


class Cluster:
    """One apiserver and one identity. ``namespace`` None: all namespaces."""

    def __init__(self, access: credentials.Access, namespace: str | None) -> None:
        self.access = access
        self.namespace = namespace
        self.ahead_ms: int | None = None
        """By how many milliseconds this machine's clock is ahead of the apiserver's, by its last answer that told the
        time."""
        self._http = access.connect("rlfleet-cli", seconds=CALL_SECONDS)

    @classmethod
    def connect(
        cls, *, kubeconfig: str | None, context: str | None, namespace: str | None, everywhere: bool = False
    ) -> Cluster:
        """With a kubeconfig, else KUBECONFIG, else the pod's service account, else ~/.kube/config."""
        try:
            access = credentials.find(kubeconfig, context)
        except ConfigError as e:
            tried = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            raise CliError(
                f"no usable Kubernetes credentials in {tried} ({str(e.__cause__ or e).rstrip('.')}): name a kubeconfig "
                "with --kubeconfig or KUBECONFIG and a context of it with --context, or run in a pod",
                Exit.UNREACHABLE,
            ) from e
        return cls(access, None if everywhere else namespace or default_namespace(kubeconfig, context))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # ---------------------------------------------------------------------------------------------- calls

    def list(self, plural: str, *, namespace: str | None = None, selector: str = "") -> list[Obj]:
        """All objects of a kind, in ``namespace`` (default: the cluster's, which may be all)."""
        prefix, kind = KINDS[plural]
        where = namespace or self.namespace
        scoped = plural in _EVERYWHERE or where is None
        path = f"{prefix}/{plural}" if scoped else f"{prefix}/namespaces/{quote(str(where), safe='')}/{plural}"
        items: list[Obj] = []
        params = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            body = self.call("GET", path, params=params)
            # Items of a list do not carry their kind.
            items += [{"apiVersion": body.get("apiVersion"), "kind": kind, **item} for item in body.get("items") or ()]
            token = (body.get("metadata") or {}).get("continue")
            if not token:
                return items
            params = params | {"continue": token}

    def get(self, plural: str, name: str, *, namespace: str | None = None) -> Obj:
        """One object."""
        return self.call("GET", self._path(plural, name, namespace))

    def merge(self, plural: str, name: str, body: Mapping[str, Any]) -> Obj:
        """Merge-patch an object: None deletes a field."""
        params = {"fieldManager": labels.CLI_MANAGER}
        return self.call("PATCH", self._path(plural, name, None), body=body, params=params)

    def allowed(self, verb: str, group: str, resource: str, *, namespace: str | None) -> bool:
        """Whether this identity may do that, as the apiserver judges (SelfSubjectAccessReview)."""
        resource, _, sub = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {k: v for k, v in attributes.items() if v} | {"namespace": namespace or ""}},
        }
        answer = self.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool((answer.get("status") or {}).get("allowed"))

    def home(self) -> str:
        """The one namespace that a command works in."""
        if self.namespace is None:
            raise CliError("name the namespace with -n: this command works in one", Exit.USAGE)
        return self.namespace

    def bearer(self) -> str | None:
        """The bearer token of this identity; None where the kubeconfig logs in by certificate."""
        header = self.access.authorization()
        return header[7:] if header and header.startswith("Bearer ") else None

    def _path(self, plural: str, name: str, namespace: str | None) -> str:
        prefix, _ = KINDS[plural]
        # A name comes from a person: whatever is in it, it stays one part of the path.
        last = quote(name, safe="")
        if plural in _EVERYWHERE:
            return f"{prefix}/{plural}/{last}"
        return f"{prefix}/namespaces/{quote(namespace or self.home(), safe='')}/{plural}/{last}"

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Obj:
        """One call; CliError for everything but success."""
        response = self.send(method, path, body=body, params=params)
        if 200 <= response.status_code < 300:
            try:
                found = response.json()
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise CliError(
                    f"{self.access.server} ({self.access.where}) does not answer as an apiserver does. Is this the "
                    "right --context?",
                    Exit.UNREACHABLE,
                )
            return found
        raise self._refused(method, path, response)

    def text(self, path: str, *, params: Mapping[str, str]) -> str:
        """One read of something that is no object: a log."""
        response = self.send("GET", path, params=params)
        if response.status_code != 200:
            raise self._refused("GET", path, response)
        return response.text

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """One call, whatever the answer; CliError where there is none."""
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            answer = self._http.request(
                method,
                path,
                params=dict(params or {}),
                content=None if body is None else json.dumps(body),
                **self.access.as_us(None if body is None else content),
            )
        except (httpx.TransportError, OSError) as e:
            raise CliError(
                f"the apiserver at {self.access.server} ({self.access.where}) does not answer: "
                f"{e or type(e).__name__}. Is the cluster up, and is this the right --context?",
                Exit.UNREACHABLE,
            ) from e
        try:
            told = parsedate_to_datetime(answer.headers["Date"])
        except (KeyError, ValueError):
            return answer
        self.ahead_ms = time.time_ns() // 1_000_000 - round(told.timestamp() * 1000)
        return answer

    def _refused(self, method: str, path: str, response: httpx.Response) -> CliError:
        try:
            message = str(response.json().get("message") or response.text)
        except ValueError:
            message = response.text
        message = message[:1000] or response.reason_phrase
        code, where = response.status_code, f"{self.access.server} ({self.access.where})"
        if code == 401:
            return CliError(f"{where} does not accept these credentials: {message}. Log in again", Exit.FORBIDDEN)
        if code == 403:
            return CliError(f"{message}. Ask for a Role that allows it, or use another --context", Exit.FORBIDDEN)
        if code == 404 and path.startswith(OURS) and labels.GROUP not in message:
            return CliError(
                f"{where} does not serve {labels.API_VERSION}: install the CRDs (rlfleet crds | kubectl apply "
                "--server-side -f -), or use another --context",
                Exit.NOT_FOUND,
            )
        if code == 404:
            space = f" in namespace {self.namespace!r}" if self.namespace else ""
            return CliError(f"{message}{space}: see rlfleet status -A for what is there", Exit.NOT_FOUND)
        if code in (429, 500, 502, 503, 504):
            return CliError(f"{where}: HTTP {code}: {message}. Try again", Exit.UNREACHABLE)
        return CliError(f"{method} {path.removeprefix(OURS)}: {message}")


def default_namespace(kubeconfig: str | None, context: str | None) -> str:
    """The namespace of the kubeconfig's context, or of the pod that we run in; else ``default``."""
    in_pod = kubeconfig is None and context is None and not os.environ.get("KUBECONFIG")
    if in_pod and os.environ.get("KUBERNETES_SERVICE_HOST"):
        folder = os.environ.get("RLFLEET_SERVICE_ACCOUNT_DIR") or credentials.SERVICE_ACCOUNT_DIR
        try:
            return Path(folder, "namespace").read_text(encoding="utf-8").strip() or "default"
        except OSError:
            return "default"
    # Imported when needed, as in rlfleet.client.credentials: it is slow to load.
    from kubernetes.config import ConfigException, kube_config

    list_contexts: Any = kube_config.list_kube_config_contexts
    try:
        contexts, active = list_contexts(kubeconfig)
    except (ConfigException, OSError) as e:
        raise CliError(f"no usable kubeconfig: {e}; name one with --kubeconfig or KUBECONFIG", Exit.UNREACHABLE) from e
    chosen = next((c for c in contexts if c["name"] == context), None) if context else active
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")
