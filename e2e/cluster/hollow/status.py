"""A pod's status from the state of its containers: phase, container statuses, conditions."""

from __future__ import annotations

from typing import Any

from e2e.cluster.hollow.container import Container, Kind

Object = dict[str, Any]


def phase(containers: list[Container], policy: str, *, ended: bool) -> str:
    """The pod's phase. ``ended``: no container runs, and none will start again."""
    mains = [c for c in containers if c.kind is Kind.MAIN]
    if ended:
        failed = any(c.exit_code not in (0, None) for c in containers if c.kind is Kind.INIT)
        succeeded = all(c.exit_code == 0 for c in mains) and not failed
        return "Succeeded" if succeeded else "Failed"
    if any(c.running or c.restarts or "terminated" in c.state for c in mains):
        return "Running"
    return "Pending"


def container_status(container: Container) -> Object:
    """One entry of containerStatuses or initContainerStatuses."""
    done = container.kind is Kind.INIT and container.exit_code == 0
    status: Object = {
        "name": container.name,
        "image": container.spec.get("image", ""),
        "imageID": "hollow",
        "ready": container.ready or done,
        "started": container.started.is_set(),
        "restartCount": container.restarts,
        "state": container.state,
        "lastState": container.last_state,
    }
    if container.identity:
        status["containerID"] = container.identity
    return status


def conditions(
    containers: list[Container], gates: dict[str, bool], *, initialized: bool, sandbox: bool, ended: str | None
) -> dict[str, tuple[str, str]]:
    """Condition type -> (status, reason). ``gates``: the pod's readiness gates. ``ended``: the final phase, if any."""
    serving = [c for c in containers if c.kind is not Kind.INIT]
    unready = [c.name for c in serving if not c.ready]
    if ended is not None:
        reason = "PodCompleted" if ended == "Succeeded" else "PodFailed"
        closed = ("False", reason)
        started = ("True", "PodCompleted" if ended == "Succeeded" else "") if initialized else ("False", reason)
        return {
            "PodReadyToStartContainers": ("False", ""),
            "Initialized": started,
            "ContainersReady": closed,
            "Ready": closed,
        }
    containers_ready = ("True", "") if not unready else ("False", "ContainersNotReady")
    ready = containers_ready
    if not unready and not all(gates.values()):
        ready = ("False", "ReadinessGatesNotReady")
    return {
        "PodReadyToStartContainers": ("True" if sandbox else "False", ""),
        "Initialized": ("True", "") if initialized else ("False", "ContainersNotInitialized"),
        "ContainersReady": containers_ready,
        "Ready": ready,
    }
