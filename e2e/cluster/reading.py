"""Reads and applies objects without starting kubectl, which costs a tenth of a second of CPU per call."""

from __future__ import annotations

import json
import ssl
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from e2e.cluster.controlplane import ADMIN, ClusterError

_TIMEOUT_SECONDS = 90.0
_CORE, _OURS = "/api/v1", "/apis/rlfleet.dev/v1alpha1"
# Word on the command line -> (API, plural, namespaced).
_KINDS: dict[str, tuple[str, str, bool]] = {}
for _api, _plural, _namespaced, _words in (
    (_CORE, "pods", True, ("pod", "po")),
    (_CORE, "secrets", True, ("secret",)),
    (_CORE, "configmaps", True, ("configmap", "cm")),
    (_CORE, "events", True, ("event", "ev")),
    (_CORE, "nodes", False, ("node", "no")),
    (_CORE, "namespaces", False, ("namespace", "ns")),
    (_OURS, "rlpipelines", True, ("rlpipeline", "rlp")),
    (_OURS, "enginepools", True, ("enginepool", "ep")),
    (_OURS, "syncrounds", True, ("syncround", "sr")),
):
    for _word in (_plural, *_words):
        _KINDS[_word] = (_api, _plural, _namespaced)


def read_path(arguments: Sequence[str]) -> str | None:
    """The API path that ``kubectl get`` with these arguments reads; None for a form that only kubectl knows."""
    words: list[str] = []
    namespace, selector = "default", ""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, given, value = word.partition("=")
        if flag in ("-n", "--namespace", "-l", "--selector"):
            if not given:
                if not rest:
                    return None
                value = rest.pop(0)
            if flag in ("-n", "--namespace"):
                namespace = value
            else:
                selector = value
        elif word.startswith("-"):
            return None
        else:
            words.append(word)
    if len(words) == 1 and "/" in words[0]:
        words = words[0].split("/")
    if len(words) not in (1, 2) or words[0] not in _KINDS or (len(words) == 2 and selector):
        return None
    api, plural, namespaced = _KINDS[words[0]]
    path = f"{api}/namespaces/{quote(namespace)}/{plural}" if namespaced else f"{api}/{plural}"
    if len(words) == 2:
        return f"{path}/{quote(words[1])}"
    return f"{path}?labelSelector={quote(selector)}" if selector else path


def applied_path(obj: Mapping[str, Any]) -> str | None:
    """The API path of an object that is to be applied; None for a kind that only kubectl knows."""
    api, plural, namespaced = _KINDS.get(str(obj["kind"]).lower(), ("", "", False))
    if api not in (f"/api/{obj['apiVersion']}", f"/apis/{obj['apiVersion']}"):
        return None
    meta = obj["metadata"]
    if "name" not in meta:
        return None
    within = f"namespaces/{quote(meta.get('namespace') or 'default')}/" if namespaced else ""
    return f"{api}/{within}{plural}/{quote(meta['name'])}"


class Reader:
    """Requests with the admin's certificate. Thread-safe.

    Connections are kept: tests poll many times a second, and a TLS handshake costs both sides more than the request.
    """

    def __init__(self, server: str, pki: Path) -> None:
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / f"{ADMIN}.crt", pki / f"{ADMIN}.key")
        self._http = httpx.Client(
            base_url=server,
            verify=context,
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
            headers={"Accept": "application/json", "User-Agent": "rlfleet-tests"},
        )
        # A cluster may be looked at by more than one object, of which only one takes it down.
        self._end = weakref.finalize(self, self._http.close)

    def close(self) -> None:
        """Close what is kept. Whoever is forgotten without it is closed, too."""
        self._end()

    def get(self, path: str) -> Any:
        """The answer's object; items of a list carry kind and apiVersion as kubectl's do."""
        status, text = self._call("GET", path)
        if status != httpx.codes.OK:
            raise ClusterError(f"GET {path}: {_refusal(status, text)}")
        answer = json.loads(text)
        if "items" in answer:
            kind = answer["kind"].removesuffix("List")
            answer["items"] = [{"kind": kind, "apiVersion": answer["apiVersion"], **item} for item in answer["items"]]
        return answer

    def apply(self, obj: Mapping[str, Any]) -> bool:
        """As ``kubectl apply --server-side --force-conflicts``. False: not done, and kubectl may say why."""
        path = applied_path(obj)
        if path is None:
            return False
        query = "?fieldManager=kubectl&fieldValidation=Strict&force=true"
        status, _ = self._call("PATCH", path + query, json.dumps(obj), {"Content-Type": "application/apply-patch+yaml"})
        return status in (httpx.codes.OK, httpx.codes.CREATED)

    def _call(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        for last in (False, True):
            try:
                answer = self._http.request(method, path, content=body, headers=headers)
                return answer.status_code, answer.content
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                # A killed apiserver leaves connections that look open. All that is sent here may be sent twice.
                if last:
                    raise ClusterError(f"{method} {path}: {error!r}") from error
            except httpx.TransportError as error:
                raise ClusterError(f"{method} {path}: {error!r}") from error
        raise AssertionError("unreachable")


def _refusal(status: int, text: bytes) -> str:
    """In kubectl's words, so that a caller sees no difference."""
    try:
        answer = json.loads(text)
        return f"Error from server ({answer.get('reason') or status}): {answer['message']}"
    except (ValueError, KeyError):
        return f"Error from server ({status}): {text.decode(errors='replace')[:500]}"
