"""What a round demands of proof (``spec.sync.verify``), with an engine whose checksums hash nothing."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.scenarios.kit import Fleet

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DEADLINES = {"pendingSeconds": 60, "stagingSeconds": 30, "pausedSeconds": 30}


def complete(done: dict[str, Any]) -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in done["status"]["conditions"] if c["type"] == "Complete")


@pytest.mark.parametrize("engine_args", [(), ("--empty-checksums",)], ids=["alone in its layout", "hashes nothing"])
def test_what_nothing_confirms_is_said_or_refused(fleet: Fleet, engine_args: tuple[str, ...]) -> None:
    replicas = 2 if engine_args else 1
    fleet.pipeline(sync={"deadlines": DEADLINES, "verify": "IfSupported"})
    fleet.pool(replicas, engine_args=engine_args)
    fleet.trainer()
    pods = fleet.ready_engines(replicas)
    done = fleet.sync(-1)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert complete(done) == ("True", "DeliveredUnconfirmed")
    fleet.pipeline(sync={"deadlines": DEADLINES, "verify": "Required"})
    refused = fleet.sync(1)["status"]
    assert (refused["failure"]["stage"], refused["failure"]["reason"]) == ("Planned", "VerifyUnsupported")
    assert [fleet.label(p) for p in pods] == ["-1"] * replicas
    assert not any(fleet.paused(p) for p in pods)
