"""One call as a proxy saw it, and the label by which it is known again in the next run.

A label leaves out what differs between two runs of one scenario (UIDs, hashes in names, versions, times): the n-th call
with a label in one run is the n-th call with it in the next, however calls to different engines interleave.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
#: Kinds whose writes are no points of a sweep: Events are best effort, and a Lease is renewed by the clock.
UNCOUNTED = frozenset({"events", "leases"})
_API_PATH = re.compile(
    r"^/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)
_POD = re.compile(r"^(?P<engine>.+-\d+)-[0-9a-f]{5}$")
_PUSH = re.compile(r"^/v1/staging/[^/]+/(?P<what>manifest|buckets/\d+)$")
_OPERATION = re.compile(r"^/v1/operations/(?P<id>[0-9a-f]{32})$")


@dataclass(slots=True)
class Call:
    """``status`` and ``answer`` are the server's; None when it never answered or was never asked."""

    number: int
    who: str
    lane: str  # "api", or "peer" for gates and senders
    peer: str  # "apiserver", an engine such as e-0, or "sender"
    peer_uid: str
    method: str
    path: str
    label: str
    occurrence: int
    body: Any
    began: float
    plural: str = ""
    ended: float | None = None
    status: int | None = None
    answer: Any = None
    fault: str = ""
    #: No label of any run: a poll, whose number depends on how long things take.
    read: bool = False

    @property
    def point(self) -> str:
        """The call's name in reports and on the command line."""
        return f"{self.label} #{self.occurrence}"

    @property
    def counted(self) -> bool:
        """It is a point of the sweeps: a write at the apiserver, or any call to a gate or sender."""
        return self.lane == "peer" or (not self.read and self.plural not in UNCOUNTED)


@dataclass(frozen=True, slots=True)
class Address:
    """Who has an address: ``name`` is the same in every run, the UID is not."""

    name: str
    uid: str


class Journal:
    """All calls of all proxies of one stand, in the order in which they began.

    ``keep`` = False remembers nothing but counts; observers see every call all the same, when it has ended.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._number = 0
        self._kinds: dict[str, str] = {}
        self.calls: list[Call] = []
        #: Writes that the apiserver answered since the last reset; Events and leases apart.
        self.written = 0
        self.observers: list[Callable[[Call], None]] = []
        self.addresses: dict[str, Address] = {}

    def reset(self) -> None:
        """Count every label from zero, and forget the calls so far."""
        with self._lock:
            self._seen.clear()
            self.calls = []
            self.written = 0

    def begin_api(self, who: str, method: str, path: str, query: Mapping[str, str], body: Any) -> Call:
        """A call to the apiserver."""
        label, plural = api_label(method, path, body)
        read = method not in WRITES
        if read:
            label = f"{'WATCH' if 'watch' in query else method} {plural}"
        return self._begin(who, "api", "apiserver", "", method, path, label, body, plural=plural, read=read)

    def begin_peer(self, who: str, method: str, url: str, body: Any) -> Call:
        """A call to a gate or a sender."""
        parts = urlsplit(url)
        address = self.addresses.get(parts.hostname or "", Address(parts.hostname or "?", ""))
        if isinstance(body, dict) and "order" in body and "id" in body:
            with self._lock:
                self._kinds[str(body["id"])] = str(body["order"].get("kind"))
        label = f"{method} {address.name} {self._what(parts.path, body)}"
        return self._begin(
            who, "peer", address.name, address.uid, method, parts.path, label, body, read=method not in WRITES
        )

    def _what(self, path: str, body: Any) -> str:
        if isinstance(body, dict) and "order" in body:
            return str(body["order"].get("kind"))
        if found := _OPERATION.match(path):
            return f"operation {self._kinds.get(found['id'], '?')}"
        if found := _PUSH.match(path):
            return found["what"]
        return path.removeprefix("/v1/")

    def _begin(
        self,
        who: str,
        lane: str,
        peer: str,
        uid: str,
        method: str,
        path: str,
        label: str,
        body: Any,
        *,
        plural: str = "",
        read: bool,
    ) -> Call:
        with self._lock:
            self._number += 1
            self._seen[label] += 1
            call = Call(
                number=self._number,
                who=who,
                lane=lane,
                peer=peer,
                peer_uid=uid,
                method=method,
                path=path,
                label=label,
                occurrence=self._seen[label],
                body=body,
                began=time.monotonic(),
                plural=plural,
                read=read,
            )
            if self._keep:
                self.calls.append(call)
        return call

    def end(self, call: Call) -> None:
        """The call is over, however it went."""
        call.ended = time.monotonic()
        if call.lane == "api" and call.counted and call.status is not None:
            with self._lock:
                self.written += 1
        for observer in self.observers:
            observer(call)


def api_label(method: str, path: str, body: Any) -> tuple[str, str]:
    """(label, plural) of a call to the apiserver."""
    found = _API_PATH.match(path)
    if found is None:
        return f"{method} {path}", ""
    plural, name, sub = found["plural"], found["name"] or "", found["sub"] or ""
    if not name and isinstance(body, dict):
        name = str((body.get("metadata") or {}).get("name") or "")
    if pod := _POD.match(name):
        name = pod["engine"]
    if plural == "syncrounds":
        name = "round"
    what = "/".join(part for part in (plural, name, sub) if part)
    return " ".join(part for part in (method, what, _content(body)) if part), plural


def _content(body: Any) -> str:
    """What a write is about."""
    if not isinstance(body, dict):
        return ""
    meta, status = body.get("metadata") or {}, body.get("status")
    if isinstance(status, dict):
        if "phase" in status:
            return f"phase={status['phase']}"
        if "activeOperation" in status:
            active = status["activeOperation"]
            if active is None:
                return "free"
            return "commit" if active.get("committed") and "committed" in status else f"claim {active.get('kind')}"
        return "ports" if set(status) == {"rendezvousClaims"} else "status"
    if "finalizers" in meta:
        return "finalizer" if meta["finalizers"] else "no finalizer"
    return ""
