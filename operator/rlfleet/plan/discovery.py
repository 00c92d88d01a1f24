"""What worker discovery says of an engine, in the form that clients of NVIDIA Dynamo read (GET /v1/rl/workers). Pure.

Invariants:
- nothing is promised that the worker's gate did not just say: an engine that did not answer, or is not up, is listed
  with an error, without routes and without a URL to call;
- a member that is not known is left out, never null;
- what is ours alone stands in one member, ``rlfleet``, so that it can neither be taken for one of Dynamo's nor collide
  with one that Dynamo adds.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rlfleet.api.discovery import OwnFacts, RLWorker
from rlfleet.api.wire import EngineState, GateStatus

#: Longest text of an error.
MAX_ERROR: Final = 500
#: Categories of characters that could make a log line, or a terminal, say something else than what was written.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Zl", "Zp"})


@dataclass(frozen=True, slots=True)
class Naming:
    """What stands for Dynamo's names. A worker is ``dyn://<namespace>.<pool>.<endpoint>``."""

    namespace: str = "dynamo"
    endpoint: str = "rl"
    components: frozenset[str] = frozenset()
    """Pools that are listed; none named: all."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose workers are asked for; empty: those of every namespace (and pipeline) that the operator serves."""

    namespace: str = ""
    pipeline: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """One live engine pod, as the apiserver tells of it."""

    namespace: str
    """Its Kubernetes namespace."""
    pipeline: str
    pool: str
    pod: str
    uid: str
    gate_url: str
    gate_name: str = ""
    """The name that its gate's certificate must carry; empty: the URL's host."""
    engine_url: str = ""
    model: str = ""
    """The pool's spec.engine.model; empty: not given."""

    @property
    def instance_id(self) -> int:
        """See ``instance_id``."""
        return instance_id(self.uid)


def instance_id(pod_uid: str) -> int:
    """The pod's number, 0 to 2**64 - 1: the first eight bytes of its UID's SHA-256, the highest first.

    Half of all are above 2**63 - 1. It is the same from every operator, and another one for another pod, also at the
    same address or under the same name.
    """
    return int.from_bytes(hashlib.sha256(pod_uid.encode()).digest()[:8], "big")


def in_order(workers: Iterable[Worker], naming: Naming) -> tuple[Worker, ...]:
    """Those that are listed, by (component, instance_id): namespace and endpoint are the same for all. Each once."""
    wanted = (w for w in workers if not naming.components or w.pool in naming.components)
    found = {(w.pool, w.instance_id): w for w in wanted}
    return tuple(found[key] for key in sorted(found))


def is_open(status: GateStatus) -> bool:
    """The engine serves weights that its gate has proof of, and every router that the gate knows lists it."""
    return (
        status.holds is not None
        and status.engine.paused is False
        and not status.uncertain
        and all(listed is True for listed in status.routed.values())
    )


def problem(status: GateStatus) -> str:
    """Why a worker whose gate answers can not be used; empty: it can."""
    engine = status.engine
    if engine.state is not EngineState.READY:
        return f"the engine is {engine.state.value}"
    if status.incarnation is None or not status.enrolled:
        return "the gate has not met its engine yet"
    if status.wedged:
        return "the engine is stuck in a broadcast group that never formed"
    return ""


def described(worker: Worker, status: GateStatus, naming: Naming) -> RLWorker:
    """The entry of a worker whose gate answered.

    ``routes`` are what the gate answers below ``/engine/``: nothing. It takes orders from the operator alone.
    """
    if why := problem(status):
        return failed(worker, why, naming)
    holds = status.holds
    ours = _ours(worker).model_copy(
        update={
            "version": holds.version if holds is not None else None,
            "manifest_digest": holds.manifest_digest if holds is not None else None,
            "fence": status.fence.generation,
            "open": is_open(status),
            "paused": status.engine.paused,
            "instance": status.engine.instance,
        }
    )
    return _known(worker, naming).model_copy(
        update={
            "system_url": worker.gate_url,
            "model": status.engine.model or worker.model or None,
            "world_size": status.engine.world_size or None,
            "rlfleet": ours,
        }
    )


def failed(worker: Worker, why: str, naming: Naming) -> RLWorker:
    """The entry of a worker of which nothing is known now: neither routes nor a URL, whatever was known before."""
    return _known(worker, naming).model_copy(update={"error": _plain(why)})


def _known(worker: Worker, naming: Naming) -> RLWorker:
    """What the apiserver tells."""
    return RLWorker(
        namespace=naming.namespace,
        component=worker.pool,
        endpoint=naming.endpoint,
        instance_id=worker.instance_id,
        transport={"http": worker.gate_url},
        request_plane_url=f"dyn://{naming.namespace}.{worker.pool}.{naming.endpoint}",
        model=worker.model or None,
        rlfleet=_ours(worker),
    )


def _ours(worker: Worker) -> OwnFacts:
    return OwnFacts(
        namespace=worker.namespace,
        pipeline=worker.pipeline,
        pod=worker.pod,
        pod_uid=worker.uid,
        engine_url=worker.engine_url or None,
    )


def _plain(text: str) -> str:
    """One line without control characters: readers log it, and some refuse others."""
    seen = "".join(" " if unicodedata.category(c) in _UNSEEN else c for c in text)
    return seen.strip()[:MAX_ERROR] or "no answer"
