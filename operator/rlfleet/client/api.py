"""Calls to the apiserver: explicit deadlines, retries of what is transient, answers as typed errors.

Invariants:
- a call that may have been carried out although its answer was lost is only repeated where that is harmless: reads,
  and creates under a name that identifies what is created;
- an error of the API becomes an error of ours that names namespace, object and remedy.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx

from rlfleet.api import labels
from rlfleet.client import errors
from rlfleet.client.credentials import Access

CALL_SECONDS = 10.0
#: A watch is opened anew so often; in between a silent connection is not trusted.
WATCH_SECONDS = 30.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_CONFLICT = 409
#: What RBAC says of a missing verb, and what the chart's admission policy does.
_FORBIDDEN_VERB = re.compile(r"(?:cannot (\w+) resource|needs the verb) \"(\w+)\"(?: on (\w+))?")

PIPELINES = "rlpipelines"
ROUNDS = "syncrounds"
DEMANDS = "trainerdemands"
POOLS = "enginepools"


class Exists(Exception):
    """A create found an object of that name."""


class Conflict(Exception):
    """A write named a resourceVersion that is not the object's any more."""


class Invalid(Exception):
    """The apiserver refused an object; the message names the field."""


class Api:
    """Our kinds in one namespace."""

    def __init__(self, access: Access, namespace: str) -> None:
        self._access = access
        self.namespace = namespace
        self._http = access.connect("rlfleet-client", seconds=CALL_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def get(self, plural: str, name: str, until: float) -> dict[str, Any]:
        """Read one object; ``until`` (monotonic seconds) bounds all tries together."""
        return self._json("GET", plural, name, until)

    def create(self, plural: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        """Create an object under its name; Exists when there is one (ours, if an answer was lost), or Invalid."""
        return self._json("POST", plural, "", until, body=body, params={"fieldManager": labels.CLIENT_MANAGER})

    def merge(self, plural: str, name: str, body: dict[str, Any], until: float) -> dict[str, Any]:
        """Merge-patch an object; only for changes that may be repeated."""
        return self._json("PATCH", plural, name, until, body=body, params={"fieldManager": labels.CLIENT_MANAGER})

    def watch(self, plural: str, name: str, version: str, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events of one object after ``version``: (type, object). Ends at ``until``, or earlier for whatever reason.

        After its end the object has to be read again: an end says nothing about the object.
        """
        seconds = min(WATCH_SECONDS, until - time.monotonic())
        if seconds <= 0:
            return
        params = {
            "watch": "1",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(seconds))),
            "allowWatchBookmarks": "false",
        }
        timeout = httpx.Timeout(CALL_SECONDS, read=seconds)
        try:
            with self._http.stream(
                "GET", self._path(plural, ""), params=params, timeout=timeout, **self._access.as_us()
            ) as response:
                if response.status_code != 200:
                    return
                for line in response.iter_lines():
                    event = json.loads(line)
                    if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
                        return
                    yield event["type"], event["object"]
        except (httpx.TransportError, ValueError, KeyError):
            return

    def _path(self, plural: str, name: str) -> str:
        path = f"/apis/{labels.GROUP}/{labels.VERSION}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{name}" if name else path

    def _json(
        self,
        method: str,
        plural: str,
        name: str,
        until: float,
        *,
        body: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        what = f"{method} {plural} {self.namespace}/{name or (body or {}).get('metadata', {}).get('name', '')}"
        pause = _FIRST_PAUSE
        while True:
            try:
                response = self._send(method, self._path(plural, name), until, body, params)
                if response.status_code not in _TRANSIENT:
                    return self._answer(response, plural, name, method)
                problem = f"HTTP {response.status_code}: {_message(response)}"
            except (httpx.TransportError, OSError) as e:
                problem = f"{type(e).__name__}: {e}"
            if time.monotonic() + pause >= until:
                raise errors.ApiUnavailable(
                    f"{what}: the apiserver at {self._access.server} ({self._access.where}) did not answer in time; "
                    f"last: {problem}"
                )
            # Spread out, or all trainers of a cluster come back in the same moment.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _send(
        self, method: str, path: str, until: float, body: dict[str, Any] | None, params: dict[str, str] | None
    ) -> httpx.Response:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return self._http.request(
            method,
            path,
            params=params,
            content=None if body is None else json.dumps(body),
            timeout=max(0.05, min(CALL_SECONDS, until - time.monotonic())),
            **self._access.as_us(None if body is None else kind),
        )

    def _answer(self, response: httpx.Response, plural: str, name: str, method: str) -> dict[str, Any]:
        status = response.status_code
        if 200 <= status < 300:
            found: dict[str, Any] = response.json()
            return found
        message = _message(response)
        if status == 401:
            raise errors.Unauthenticated(
                f"the apiserver does not accept the credentials from {self._access.where}: {message}"
            )
        if status == 403:
            match = _FORBIDDEN_VERB.search(message)
            if match is None:
                raise errors.Forbidden(message, verb=method.lower(), resource=plural)
            verb, resource = (match[1], match[2]) if match[1] else (match[2], match[3])
            raise errors.Forbidden(
                f'{message}. Grant the verb "{verb}" on {resource}.{labels.GROUP} in namespace {self.namespace} to '
                "this identity, by a Role and a RoleBinding",
                verb=verb,
                resource=resource,
            )
        if status == 404:
            raise self._not_found(plural, name, message)
        if status == _CONFLICT and _reason(response) == "AlreadyExists":
            raise Exists
        if status == _CONFLICT and _reason(response) == "Conflict":
            raise Conflict(message)
        if status in (400, 409, 422):
            raise Invalid(message)
        raise errors.ClientError(f"{method} {plural} {name}: HTTP {status}: {message}")

    def _not_found(self, plural: str, name: str, message: str) -> errors.NotFound:
        if f'namespaces "{self.namespace}" not found' in message:
            return self._namespace_not_found()
        if f"{plural}.{labels.GROUP}" not in message:
            return errors.NotInstalled(
                f"the cluster at {self._access.server} does not serve {labels.API_VERSION}: install the rlfleet CRDs"
            )
        if plural == ROUNDS:
            return errors.RoundNotFound(f"there is no SyncRound {name!r} in namespace {self.namespace!r}")
        if plural == DEMANDS:
            return errors.DemandNotFound(f"there is no TrainerDemand {name!r} in namespace {self.namespace!r}")
        if self._no_namespace():
            return self._namespace_not_found()
        if plural == POOLS:
            return errors.NotFound(f"there is no EnginePool {name!r} in namespace {self.namespace!r}")
        return errors.PipelineNotFound(
            f"there is no RLPipeline {name!r} in namespace {self.namespace!r}: check Client(namespace=..., "
            "pipeline=...), or create it"
        )

    def _namespace_not_found(self) -> errors.NamespaceNotFound:
        return errors.NamespaceNotFound(f"namespace {self.namespace!r} does not exist: check Client(namespace=...)")

    def _no_namespace(self) -> bool:
        """The namespace is proven not to exist (reads in a missing namespace only say that the object is missing)."""
        try:
            path = f"/api/v1/namespaces/{self.namespace}"
            return self._send("GET", path, time.monotonic() + CALL_SECONDS, None, None).status_code == 404
        except (httpx.TransportError, OSError):
            return False


def _status(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _reason(response: httpx.Response) -> str:
    return str(_status(response).get("reason") or "")


def _message(response: httpx.Response) -> str:
    return str(_status(response).get("message") or response.text or response.reason_phrase)[:1000]
