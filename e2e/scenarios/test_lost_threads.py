"""What a takeover finds that its predecessor did not leave: another trainer's bytes, or a round without its status."""

from __future__ import annotations

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, wait_until
from e2e.scenarios.test_deletion import SYNC
from e2e.scenarios.test_identity import uids, write_status
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_round_never_takes_another_trainers_bytes_for_its_own(
    fleet: Fleet, operator: Operator, cluster: LocalCluster
) -> None:
    """Planned anew after a takeover, the version is there again: of another process, and with other weights."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    sums = [fleet.checksum(p) for p in pods]
    digest = fleet.publish(1, bulk=256)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Staging", "Staging", every=0.01)
    operator.kill()
    assert fleet.phase(name) == "Staging", "too late: the test kills the operator while bytes are on their way"
    cluster.kubectl("delete", "pod", "trainer", "-n", fleet.namespace, "--force", "--grace-period=0")
    fleet.trainer()
    assert fleet.publish(1, seed=4711) != digest
    operator.start()
    status = fleet.ended(name)["status"]
    assert (status["phase"], status["committed"]) == ("Failed", False), status
    assert (status["failure"]["stage"], status["failure"]["reason"]) == ("Planned", "SenderIncarnationGone")
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    assert [fleet.label(p) for p in pods] == ["-1", "-1"]
    assert [fleet.checksum(p) for p in pods] == sums
    assert not any(fleet.paused(p) for p in pods)
    # Asked for by the trainer that holds them, these bytes are as good as any.
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    assert fleet.status("rlpipeline", "p")["committed"]["senderIncarnation"] == fleet.incarnation


def test_a_commit_outlives_the_status_of_its_round(fleet: Fleet, operator: Operator) -> None:
    """The operator dies between the commit and the round's end, and the round's status is lost, plan and all."""
    pods = serialized_fleet(fleet, 2, sync=SYNC)
    fleet.fault(pods[0], "continue_generation", action="hold", times=1)
    fleet.publish(1)
    name = fleet.order(1)
    wait_until(lambda: fleet.phase(name) == "Committed", "Committed", every=0.01)
    operator.kill()
    fleet.heal(pods[0])
    before = fleet.status("rlpipeline", "p")
    assert before["activeOperation"]["committed"] is True, "too late: the test kills the operator before it is done"
    write_status(fleet, "syncround", name, None)
    sums = {fleet.checksum(p) for p in pods}
    operator.start()
    done = fleet.ended(name)
    assert (done["status"]["phase"], condition(done, "Complete")) == ("Succeeded", "True"), done["status"]
    assert "plan" not in done["status"], "nothing was moved anew"
    assert not any(fleet.paused(p) for p in pods), "engines first, then the round's end"
    assert [fleet.label(p) for p in pods] == ["1", "1"]
    assert {fleet.checksum(p) for p in pods} == sums
    assert fleet.status("rlpipeline", "p")["committed"] == before["committed"]
    assert uids(fleet.engines()) == uids(pods)
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
