"""Engine pods as the apiserver tells of them: whose they are, where their gates are, whether they live. Pure.

Invariants:
- only pods that a pool made, or that its selector adopts, are engines: a label of ours alone, which anybody may write,
  makes nobody a member of a round;
- gone and unborn are proven by the pod's own status; whatever it leaves open counts as "may still serve".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlfleet.api import labels, naming, wire
from rlfleet.control.peers import Peer
from rlfleet.plan.adopt import made_by_pool
from rlfleet.plan.endings import disruption_of
from rlfleet.plan.pods import CHECKPOINT_DIR_ENV, ENGINE_URL_ENV
from rlfleet.plan.quarantine import quarantine_of
from rlfleet.plan.rounds import Engine
from rlfleet.plan.template import TLS_DIR_ENV, gate_variable
from rlfleet.plan.topology import assigned_evidence


def _all(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Adopted pods may run the gate as an ordinary container."""
    return [*(pod["spec"].get("initContainers") or []), *(pod["spec"].get("containers") or [])]


def gate_port(pod: Mapping[str, Any]) -> int:
    """The port that the pod's gate listens on, from the pod itself (the pool's spec may have changed since)."""
    for container in _all(pod):
        if container.get("name") == "gate":
            for port in container.get("ports") or []:
                return int(port["containerPort"])
    return wire.DEFAULT_GATE_PORT


def gate_peer(pod: Mapping[str, Any]) -> Peer | None:
    """Where the pod's gate is; None while the pod has no address."""
    ip = (pod.get("status") or {}).get("podIP")
    if not ip:
        return None
    host = f"[{ip}]" if ":" in ip else ip
    meta = pod["metadata"]
    address = f"{host}:{gate_port(pod)}"
    # The pod's own spec, and nothing on the way there, says which of both it is.
    if gate_variable(pod, TLS_DIR_ENV):
        return Peer(meta["name"], meta["uid"], f"https://{address}", naming.gate_server_name(meta["namespace"]))
    return Peer(meta["name"], meta["uid"], f"http://{address}")


def engine_ports(pod: Mapping[str, Any]) -> frozenset[int]:
    """Ports of the engine as the pod was made, where its containers name them: whoever makes an adopted pod may take
    the variable from elsewhere, or leave the port to the scheme."""
    found = set()
    for container in _all(pod):
        for env in container.get("env") or []:
            if env.get("name") == ENGINE_URL_ENV:
                try:
                    found.add(urlsplit(str(env.get("value") or "")).port)
                except ValueError:
                    continue
    return frozenset(port for port in found if port)


def checkpoint_mount(pod: Mapping[str, Any]) -> str | None:
    """Where the pod's gate and engine mount the volume of checkpoints; None: they mount none."""
    return gate_variable(pod, CHECKPOINT_DIR_ENV)


def is_gone(pod: Mapping[str, Any]) -> bool:
    """The pod's engine has ended for good: the pod has finished, or its engine container has and never restarts."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    if pod["spec"].get("restartPolicy") != "Never":
        return False
    engine: Mapping[str, Any] = next(
        (c for c in status.get("containerStatuses") or [] if c.get("name") == "engine"), {}
    )
    return "terminated" in (engine.get("state") or {})


def is_unborn(pod: Mapping[str, Any]) -> bool:
    """Nothing of the pod has ever run: it waits for a node or an image, so no engine of it can serve."""
    if not (pod.get("status") or {}).get("podIP"):
        return True
    gate = _sidecar(pod)
    return "waiting" in (gate.get("state") or {}) and _runs_first(gate)


def is_starting(pod: Mapping[str, Any]) -> bool:
    """The gate runs for the first time and is not up yet: its silence is that of a start, for a while.

    Known of gates that are native sidecars with a start-up probe; one that was up before is never called starting.
    """
    gate = _sidecar(pod)
    return "running" in (gate.get("state") or {}) and gate.get("started") is False and _runs_first(gate)


def _sidecar(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the node tells of the gate's container; empty: nothing."""
    told = (pod.get("status") or {}).get("initContainerStatuses") or []
    return next((c for c in told if c.get("name") == "gate"), {})


def _runs_first(container: Mapping[str, Any]) -> bool:
    return not container.get("lastState") and not container.get("restartCount")


def is_owned(pod: Mapping[str, Any]) -> bool:
    """An EnginePool controls the pod."""
    return bool(made_by_pool(pod))


def made_by(pod: Mapping[str, Any], pool: Mapping[str, Any] | None) -> bool:
    """``pool`` is the very pool that made the pod, not a later one of its name."""
    uid = pool["metadata"]["uid"] if pool is not None else None
    return any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or [])


def engine_of(pod: Mapping[str, Any], *, adopter: str = "", index: int | None = None) -> Engine:
    """An engine pod as the planner sees it, before its gate was asked.

    ``adopter``: name of the pool that adopts it, which then counts it as engine ``index``; empty: a pool made it.
    """
    meta = pod["metadata"]
    peer = gate_peer(pod)
    assigned = (meta.get("annotations") or {}).get(labels.DEVICES)
    return Engine(
        name=meta["name"],
        pool=adopter or (meta.get("labels") or {}).get(labels.POOL, ""),
        pod_uid=meta["uid"],
        url=peer.url if peer else "",
        status=None,
        gone=is_gone(pod),
        leaving="deletionTimestamp" in meta or bool(disruption_of(pod)),
        owned=is_owned(pod),
        unborn=is_unborn(pod),
        starting=is_starting(pod),
        assigned=assigned_evidence(assigned) if assigned else None,
        index=_index(pod) if index is None else index,
        checkpoint_mount=checkpoint_mount(pod),
        quarantined=quarantine_of(pod) is not None,
        address=(pod.get("status") or {}).get("podIP") or "",
    )


def _index(pod: Mapping[str, Any]) -> int:
    text = (pod["metadata"].get("labels") or {}).get(labels.ENGINE_INDEX, "")
    return int(text) if text.isascii() and text.isdigit() else -1
