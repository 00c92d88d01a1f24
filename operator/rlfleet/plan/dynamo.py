"""Workers as a Dynamo frontend lists them (``GET /v1/rl/workers``), and which pod each of them runs in. Pure.

Invariants:
- a list that can not be read whole is an error, never a shorter list; one that was not had is unknown, never empty;
- a worker is an engine only by identity: its instance id is the one that the gate in the pod reads from the process
  beside it. An address proves nothing, for it may be another process's by now; it only has to agree;
- an instance id is text here. It is an unsigned 64-bit number on the wire, more than many readers of JSON can hold.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

#: The version of the list that this reads. Frontends from before there were versions leave it out.
PROTOCOL: Final = 1
MAX_WORKERS: Final = 4096
MAX_ROUTES: Final = 256
_MAX_TEXT: Final = 512
_U64: Final = 2**64

#: Routes that a gate needs to keep a worker on the right weights: to pause it, load, name the version, read it back,
#: drop caches, and let it go on.
REQUIRED: Final = frozenset(
    {
        "pause_generation",
        "resume_generation",
        "update_weights_from_disk",
        "flush_cache",
        "set_weight_version",
        "get_weight_version",
    }
)


class Unreadable(Exception):
    """The answer is not a list of workers: nothing is known. The message says what is wrong with it."""


class ProtocolRefused(Unreadable):
    """The list is of a version that this does not know."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One entry. ``error``: why its probe failed; it has neither routes nor a system URL then."""

    namespace: str
    component: str
    endpoint: str
    instance_id: str
    system_url: str | None = None
    routes: frozenset[str] = frozenset()
    model: str | None = None
    world_size: int | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.namespace}/{self.component}/{self.instance_id}"


@dataclass(frozen=True, slots=True)
class Listing:
    """A whole list. ``protocol`` None: the frontend told no version."""

    namespace: str
    workers: tuple[Worker, ...]
    protocol: int | None = None


def parse(status: int, body: Any) -> Listing:
    """Read an answer (its HTTP status, and its body as JSON); Unreadable when it is anything but a whole list."""
    if status != 200:
        told = body.get("message") or body.get("error") if isinstance(body, dict) else None
        raise Unreadable(f"HTTP {status}" + (f": {str(told)[:200]}" if told else ""))
    if not isinstance(body, dict):
        raise Unreadable("the answer is no JSON object")
    protocol = body.get("protocol_version")
    if protocol is not None and (isinstance(protocol, bool) or protocol != PROTOCOL or not isinstance(protocol, int)):
        raise ProtocolRefused(f"protocol_version is {str(protocol)[:40]!r}; known are {PROTOCOL} and none at all")
    entries = body.get("workers")
    if not isinstance(entries, list):
        raise Unreadable("workers is no list")
    if len(entries) > MAX_WORKERS:
        raise Unreadable(f"{len(entries)} workers are more than {MAX_WORKERS}")
    workers = tuple(_worker(i, entry) for i, entry in enumerate(entries))
    seen = Counter((w.namespace, w.component, w.endpoint, w.instance_id) for w in workers)
    twice = next((key for key, count in seen.items() if count > 1), None)
    if twice is not None:
        raise Unreadable(f"{'/'.join(twice)} is listed twice")
    return Listing(_text("", body, "namespace"), workers, protocol)


def _worker(index: int, entry: Any) -> Worker:
    where = f"workers[{index}]."
    if not isinstance(entry, dict):
        raise Unreadable(f"{where[:-1]} is no object")
    number = entry.get("instance_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _U64:
        raise Unreadable(f"{where}instance_id is no unsigned 64-bit number")
    size = entry.get("world_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**31):
        raise Unreadable(f"{where}world_size is no positive number")
    routes = entry.get("routes")
    if not isinstance(routes, list) or len(routes) > MAX_ROUTES:
        raise Unreadable(f"{where}routes is no list of at most {MAX_ROUTES}")
    if not all(isinstance(r, str) and r and len(r) <= _MAX_TEXT for r in routes):
        raise Unreadable(f"{where}routes has an entry that is no route")
    error = _optional(where, entry, "error")
    closed = "error" in entry and entry["error"] is not None
    return Worker(
        namespace=_text(where, entry, "namespace"),
        component=_text(where, entry, "component"),
        endpoint=_text(where, entry, "endpoint"),
        instance_id=str(number),
        system_url=None if closed else _optional(where, entry, "system_url"),
        routes=frozenset() if closed else frozenset(routes),
        model=_optional(where, entry, "model"),
        world_size=size,
        error=(error or "its probe failed") if closed else "",
    )


def _text(where: str, entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value or len(value) > _MAX_TEXT:
        raise Unreadable(f"{where}{key} is no text of 1 to {_MAX_TEXT} characters")
    return value


def _optional(where: str, entry: Mapping[str, Any], key: str) -> str | None:
    """Text, cut to what is kept; None where it is left out or blank."""
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"{where}{key} is no text")
    return value.strip()[:_MAX_TEXT] or None if value else None


# ------------------------------------------------------------------------------------------------ joining


class Standing(StrEnum):
    """What discovery says of the engine in one pod."""

    JOINED = "Joined"  # listed, healthy, and the very process that the pod's gate sees
    UNTOLD = "Untold"  # its gate has not read an instance id yet, so nothing can be said
    UNLISTED = "Unlisted"  # the process runs and is not in the list: neither served by Dynamo nor gone
    FAILING = "Failing"  # listed with an error
    CONTRADICTED = "Contradicted"  # listed in a way that does not fit the pod
    LACKING = "Lacking"  # listed without a route that a gate needs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod that may run a worker. ``instance``: what its gate reads from the process beside it, None while unknown."""

    uid: str
    name: str
    ip: str
    instance: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one pod's engine stands, with its entry if there is exactly one, and what is wrong, for people."""

    standing: Standing
    message: str = ""
    worker: Worker | None = None

    @property
    def joined(self) -> bool:
        """It may take part in rounds and serve."""
        return self.standing is Standing.JOINED


def join(
    listing: Listing, pods: Iterable[Candidate], *, port: int, components: frozenset[str] = frozenset()
) -> dict[str, Verdict]:
    """The verdict on each pod, by its UID. ``port``: of the workers' system servers; ``components``: empty for all."""
    candidates = list(pods)
    entries: dict[str, list[Worker]] = {}
    for w in considered(listing, components):
        entries.setdefault(w.instance_id, []).append(w)
    owners = Counter(c.instance for c in candidates if c.instance is not None)
    return {c.uid: _verdict(c, entries, owners, port) for c in candidates}


def considered(listing: Listing, components: frozenset[str]) -> tuple[Worker, ...]:
    """The entries of these components; of all where none is named."""
    return tuple(w for w in listing.workers if not components or w.component in components)


def _verdict(c: Candidate, entries: Mapping[str, Sequence[Worker]], owners: Mapping[str, int], port: int) -> Verdict:
    if c.instance is None:
        return Verdict(Standing.UNTOLD, "its gate has read no instance id from the worker yet")
    found = entries.get(c.instance, ())
    if owners[c.instance] > 1:
        return Verdict(Standing.CONTRADICTED, f"gates of several pods read instance {c.instance}: they see one process")
    if not found:
        return Verdict(Standing.UNLISTED, f"instance {c.instance} runs, and the frontend does not list it")
    if len(found) > 1:
        names = ", ".join(w.name for w in found[:3])
        return Verdict(Standing.CONTRADICTED, f"instance {c.instance} is listed {len(found)} times: {names}")
    worker = found[0]
    if worker.error:
        return Verdict(Standing.FAILING, f"instance {c.instance} is listed with an error: {worker.error}", worker)
    if not is_at(worker.system_url, c.ip, port):
        told = f"at {worker.system_url}" if worker.system_url else "without a system URL"
        return Verdict(
            Standing.CONTRADICTED, f"instance {c.instance} is listed {told}, not on port {port} of {c.ip}", worker
        )
    lacking = sorted(REQUIRED - worker.routes)
    if lacking:
        return Verdict(Standing.LACKING, f"instance {c.instance} advertises no {', '.join(lacking)}", worker)
    return Verdict(Standing.JOINED, "", worker)


def is_at(url: str | None, ip: str, port: int) -> bool:
    """The URL is that of this address and port. A host name is not an address, and its answer changes with time."""
    if url is None:
        return False
    try:
        parts = urlsplit(url)
        return ipaddress.ip_address(parts.hostname or "") == ipaddress.ip_address(ip) and parts.port == port
    except ValueError:
        return False


def strangers(listing: Listing, addresses: Iterable[str], *, components: frozenset[str]) -> tuple[Worker, ...]:
    """Healthy workers at an address that no pod with a gate has: nobody keeps them on the right weights."""
    known = set(addresses)
    return tuple(w for w in considered(listing, components) if not w.error and host_of(w.system_url) not in known)


def host_of(url: str | None) -> str | None:
    """The IP address in the URL, as pods' addresses are written; None: it has none."""
    try:
        return str(ipaddress.ip_address(urlsplit(url).hostname or "")) if url else None
    except ValueError:
        return None
