"""Why a pod ended: its status' own words, those of the disruption, and those that only the kubelet's Events have."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.plan.endings import evictions
from rlfleet.plan.lifecycle import pod_fact
from rlfleet.plan.pods import build_pod
from tests.plan.pool_kit import pool

KILLED = {"exitCode": 137, "reason": "Error"}
COMPLETED = {"exitCode": 0, "reason": "Completed"}
TARGET = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "low on memory. "}
EVICTED = {"reason": "Evicted", "message": "Usage exceeds the limit "}


@pytest.mark.parametrize(
    ("ended", "status", "text", "unexplained"),
    [
        (KILLED, {}, "engine ended with exit code 137 (Error)", False),
        (KILLED, EVICTED, "Evicted: Usage exceeds the limit", False),
        # What the kubelet writes where every container obeyed: its reason and message are gone, a condition stays.
        (COMPLETED, {"phase": "Succeeded"}, "engine ended with exit code 0 (Completed)", True),
        (
            COMPLETED,
            {"phase": "Succeeded", "conditions": [TARGET]},
            "TerminationByKubelet: low on memory. (engine ended with exit code 0 (Completed))",
            False,
        ),
        (COMPLETED, EVICTED, "Evicted: Usage exceeds the limit", False),
    ],
)
def test_what_ended_the_whole_pod_explains_the_engine_s_end(
    ended: dict[str, Any], status: dict[str, Any], text: str, unexplained: bool
) -> None:
    pod = build_pod(pool(), 0, "a-0", public_keys={})
    pod["metadata"]["uid"] = "u"
    engine = {"name": "engine", "state": {"terminated": ended}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [engine], **status}
    found = pod_fact(pod, owner_uid="pool-uid")
    assert (found.finished, found.failure, found.unexplained) == (True, text, unexplained)


def event(uid: str, note: str, *, reason: str = "Evicted", kind: str = "Pod") -> dict[str, Any]:
    return {"reason": reason, "note": note, "regarding": {"kind": kind, "uid": uid}}


def test_evictions_are_read_by_the_pod_s_uid() -> None:
    told = [
        event("a", "Usage exceeds the limit "),
        event("b", "Stopping container engine", reason="Killing"),
        event("c", "", kind="Pod"),
        event("d", "not of a pod", kind="EnginePool"),
    ]
    assert evictions(told) == {"a": "Evicted: Usage exceeds the limit", "c": "Evicted: no message given"}
