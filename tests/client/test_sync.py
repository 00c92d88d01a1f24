"""``Client.sync`` at the real apiserver, with the test as the operator."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlfleet.api import labels, naming
from rlfleet.client import (
    Client,
    HoldingNeedsAction,
    RoutingDegraded,
    SenderNotReady,
    SyncFailed,
    SyncRefused,
    SyncResult,
    SyncTimeout,
    WaitTimeout,
)
from tests.client.conftest import Sync
from tests.client.fleet import DIGEST, INCARNATION, KEY, OTHER, SECONDS, Fleet
from tests.fault.proxy import Fault, FaultProxy, Rule, Watching

pytestmark = pytest.mark.cluster


def test_sync_creates_the_round_and_returns_what_it_brought(fleet: Fleet, client: Client, sync: Sync) -> None:
    told: list[tuple[str, str]] = []
    running = sync(client, 1, manifest_digest=DIGEST, on_progress=lambda phase, detail: told.append((phase, detail)))
    (made,) = fleet.wait_rounds()
    pipeline = client.pipeline()
    name = made["metadata"]["name"]
    assert name == naming.round_name("demo", pipeline.metadata.uid, INCARNATION, 1, 1)
    assert made["metadata"]["labels"] == {labels.PIPELINE: "demo"}
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("RLPipeline", "demo", pipeline.metadata.uid)
    assert made["spec"] == {
        "pipeline": "demo",
        "version": 1,
        "kind": "Refresh",
        "senderIncarnation": INCARNATION,
        "attempt": 1,
        "manifestDigest": DIGEST,
        "allowRollback": False,
        "cancel": False,
    }
    assert not running.done()
    fleet.phase(name, "Staging", "pushing to 4 gates")
    fleet.succeed(name)
    result = running.result(SECONDS)
    assert (result.version, result.round, result.attempt) == (1, name, 1)
    assert result.manifest_digest == DIGEST
    assert result.timings == {"planMs": 1, "stageMs": 20, "pausedMs": 30, "totalMs": 60}
    assert result.transports == {"Serialized": 3, "Broadcast": 1}
    assert result.bytes == 4096
    assert not result.already_committed
    assert told[0] == ("Pending", "")
    assert ("Staging", "pushing to 4 gates") in told
    assert told[-1][0] == "Succeeded"


def test_a_lost_create_answer_finds_the_same_round(
    fleet: Fleet, proxy: FaultProxy, proxied: Client, sync: Sync
) -> None:
    lost = proxy.strike(Rule(lambda call: call.method == "POST", Fault.DROP))
    running = sync(proxied, 1)
    (made,) = fleet.wait_rounds()
    fleet.succeed(made["metadata"]["name"])
    assert running.result(SECONDS).round == made["metadata"]["name"]
    assert lost.struck == 1
    assert [call.method for call in proxy.journal.calls].count("POST") == 2
    assert len(fleet.rounds()) == 1


def test_transient_errors_are_ridden_out(fleet: Fleet, proxy: FaultProxy, proxied: Client, sync: Sync) -> None:
    busy = proxy.strike(Rule(lambda call: True, Fault.BUSY, times=3))
    running = sync(proxied, 1)
    (made,) = fleet.wait_rounds()
    fleet.succeed(made["metadata"]["name"])
    assert running.result(SECONDS).version == 1
    assert busy.struck == 3


@pytest.mark.parametrize("how", [Watching.FORBID, Watching.CLOSE])
def test_without_watches_it_polls(how: Watching, fleet: Fleet, proxy: FaultProxy, proxied: Client, sync: Sync) -> None:
    proxy.set_watching(how, "syncrounds", "rlpipelines")
    running = sync(proxied, 1)
    (made,) = fleet.wait_rounds()
    fleet.succeed(made["metadata"]["name"])
    assert running.result(SECONDS).round == made["metadata"]["name"]


def test_two_callers_share_one_round(fleet: Fleet, client: Client, sync: Sync) -> None:
    first, second = sync(client, 1), sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.succeed(made["metadata"]["name"])
    assert first.result(SECONDS).round == second.result(SECONDS).round
    assert len(fleet.rounds()) == 1


def test_nothing_is_asked_for_when_the_version_is_committed(fleet: Fleet, client: Client) -> None:
    fleet.committed(1)
    for given in ({"manifest_digest": DIGEST}, {}):
        result = client.sync(1, timeout=SECONDS, **given)
        assert result.already_committed
        assert result.manifest_digest == DIGEST
    assert fleet.rounds() == []


def test_other_bytes_under_the_committed_version_are_asked_for(fleet: Fleet, client: Client, sync: Sync) -> None:
    fleet.committed(1)
    running = sync(client, 1, manifest_digest=OTHER)
    (made,) = fleet.wait_rounds()
    fleet.succeed(made["metadata"]["name"], OTHER)
    assert running.result(SECONDS).manifest_digest == OTHER
    # And other bytes again, although the round of that name has succeeded: another attempt, not its answer.
    again = sync(client, 1, manifest_digest="sha256:" + "c" * 64)
    second = fleet.wait_rounds(2)[1]
    assert second["spec"]["attempt"] == 2
    fleet.succeed(second["metadata"]["name"], "sha256:" + "c" * 64)
    assert again.result(SECONDS).attempt == 2


def test_a_running_round_of_other_bytes_is_not_adopted(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1, manifest_digest=DIGEST)
    (made,) = fleet.wait_rounds()
    with pytest.raises(SyncRefused, match="other bytes") as refused:
        client.sync(1, sender_incarnation=INCARNATION, manifest_digest=OTHER, timeout=SECONDS)
    assert refused.value.reason == "ManifestMismatch"
    assert refused.value.round == made["metadata"]["name"]
    fleet.succeed(made["metadata"]["name"])
    running.result(SECONDS)


def test_a_version_below_the_committed_one_is_refused(fleet: Fleet, client: Client, sync: Sync) -> None:
    fleet.committed(5)
    with pytest.raises(SyncRefused, match=r"version 4 is below version 5.*allow_rollback") as refused:
        client.sync(4, timeout=SECONDS)
    assert refused.value.reason == "VersionGoesBackwards"
    assert fleet.rounds() == []
    running = sync(client, 4, allow_rollback=True)
    (made,) = fleet.wait_rounds()
    assert made["spec"]["allowRollback"] is True
    assert made["spec"]["expectedCommitted"] == 5
    fleet.succeed(made["metadata"]["name"])
    assert running.result(SECONDS).version == 4


def test_a_failed_round_raises_what_the_round_says(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    name = made["metadata"]["name"]
    fleet.fail(name)
    with pytest.raises(SyncFailed, match=r"disk full.*not committed.*retries=1") as failed:
        running.result(SECONDS)
    error = failed.value
    assert (error.round, error.phase, error.stage, error.reason) == (name, "Failed", "Staging", "StagingFailed")
    assert (error.digest, error.version, error.committed) == ("d1", 1, False)


def test_a_degraded_round_raises_although_committed(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.fail(made["metadata"]["name"], committed=True, reason="RoutingDegraded")
    with pytest.raises(RoutingDegraded, match=r"IS committed.*do not send it again") as failed:
        running.result(SECONDS)
    assert failed.value.committed
    assert (failed.value.version, failed.value.reason) == (1, "RoutingDegraded")
    # Retries are for versions that are not committed: no other attempt is made.
    with pytest.raises(RoutingDegraded):
        sync(client, 1, retries=3).result(SECONDS)
    assert len(fleet.rounds()) == 1


def hold(fleet: Fleet, name: str) -> None:
    fleet.phase(name, "Holding", "1 engine is missing (e-0-abc); delete the named pods", reason="HoldingNeedsAction")


def test_a_round_that_needs_a_person_is_an_error_with_the_remedy(fleet: Fleet, client: Client, sync: Sync) -> None:
    running, patient = sync(client, 1), sync(client, 1, on_holding="wait")
    (made,) = fleet.wait_rounds()
    name = made["metadata"]["name"]
    fleet.phase(name, "Holding", "1 engine is missing")
    hold(fleet, name)
    with pytest.raises(HoldingNeedsAction, match=r"e-0-abc.*delete the named pods.*on_holding") as held:
        running.result(SECONDS)
    assert (held.value.version, held.value.round, held.value.committed) == (1, name, False)
    assert not patient.done()
    fleet.succeed(name)
    assert patient.result(SECONDS).round == name
    with pytest.raises(ValueError, match="on_holding"):
        client.sync(1, on_holding="ignore")  # type: ignore[arg-type]


def test_a_missing_operator_is_said_while_waiting(fleet: Fleet, client: Client, sync: Sync) -> None:
    told: list[tuple[str, str]] = []
    heard = threading.Event()

    def listen(phase: str, detail: str) -> None:
        told.append((phase, detail))
        if "no operator" in detail:
            heard.set()

    running = sync(client, 1, on_progress=listen)
    (made,) = fleet.wait_rounds()
    assert heard.wait(SECONDS)
    assert told[0] == ("Pending", "")
    assert fleet.namespace in told[-1][1]
    fleet.phase(made["metadata"]["name"], "Staging", "pushing")
    fleet.succeed(made["metadata"]["name"])
    running.result(SECONDS)


def test_a_pipeline_that_is_created_anew_ends_the_sync_by_name(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.cluster.kubectl("delete", "rlpipeline", "demo", f"--namespace={fleet.namespace}")
    fleet.create_pipeline()
    fleet.cluster.kubectl(
        "delete", "syncround", made["metadata"]["name"], f"--namespace={fleet.namespace}", "--ignore-not-found"
    )
    with pytest.raises(SyncFailed, match="demo was deleted") as failed:
        running.result(SECONDS)
    assert failed.value.reason == "PipelineGone"


@pytest.mark.parametrize("phase", ["Superseded", "Cancelled", "Expired"])
def test_other_ends_are_failures_with_their_phase(phase: str, fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.round_status(made["metadata"]["name"], phase=phase, outcome=phase)
    with pytest.raises(SyncFailed) as failed:
        running.result(SECONDS)
    assert failed.value.phase == phase


def test_attempts_rise_only_after_a_failure_and_only_when_asked(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.fail(made["metadata"]["name"])
    with pytest.raises(SyncFailed):
        running.result(SECONDS)
    # Asking again without retries answers the same end and makes nothing.
    with pytest.raises(SyncFailed) as again:
        sync(client, 1).result(SECONDS)
    assert again.value.round == made["metadata"]["name"]
    assert len(fleet.rounds()) == 1
    # With a retry the next attempt is made; it fails too, and the retries are used up.
    retried = sync(client, 1, retries=1)
    second = fleet.wait_rounds(2)[1]
    assert second["spec"]["attempt"] == 2
    fleet.fail(second["metadata"]["name"])
    with pytest.raises(SyncFailed) as failed:
        retried.result(SECONDS)
    assert failed.value.round == second["metadata"]["name"]
    assert len(fleet.rounds()) == 2
    # The latest attempt is what counts, also without retries.
    third = sync(client, 1, retries=2)
    made_third = fleet.wait_rounds(3)[2]
    assert made_third["spec"]["attempt"] == 3
    fleet.succeed(made_third["metadata"]["name"])
    assert third.result(SECONDS).attempt == 3
    assert sync(client, 1).result(SECONDS).attempt == 3
    assert len(fleet.rounds()) == 3


def test_a_timeout_leaves_the_round_alone_and_says_how_to_stop_it(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1, timeout=2)
    (made,) = fleet.wait_rounds()
    name = made["metadata"]["name"]
    with pytest.raises(SyncTimeout, match=r"client\.cancel") as late:
        running.result(SECONDS)
    assert late.value.round == name
    assert late.value.phase == "Pending"
    assert fleet.rounds()[0]["spec"]["cancel"] is False
    client.cancel(name)
    assert fleet.rounds()[0]["spec"]["cancel"] is True


def test_a_deleted_round_is_not_waited_for(fleet: Fleet, client: Client, sync: Sync) -> None:
    running = sync(client, 1)
    (made,) = fleet.wait_rounds()
    fleet.cluster.kubectl("delete", "syncround", made["metadata"]["name"], f"--namespace={fleet.namespace}")
    with pytest.raises(SyncFailed, match="was deleted") as failed:
        running.result(SECONDS)
    assert failed.value.reason == "RoundGone"


def test_an_unknown_sender_is_waited_for_and_then_named(fleet: Fleet, client: Client, sync: Sync) -> None:
    told: list[str] = []
    with pytest.raises(SenderNotReady, match=r"incarnation trainer-2.*spec.weights.sender"):
        client.sync(
            2,
            sender_incarnation="trainer-2",
            timeout=SECONDS,
            sender_timeout=1,
            on_progress=lambda phase, _: told.append(phase),
        )
    assert told == ["WaitingForSender"]
    assert fleet.rounds() == []
    running = sync(client, 2, sender_incarnation="trainer-2")
    fleet.sender_seen("trainer-2", 2)
    (made,) = fleet.wait_rounds()
    assert made["spec"]["senderIncarnation"] == "trainer-2"
    fleet.succeed(made["metadata"]["name"])
    running.result(SECONDS)


def test_public_keys_and_wait_for(fleet: Fleet, client: Client) -> None:
    with pytest.raises(WaitTimeout, match="publicKeys"):
        client.public_keys(timeout=0.5)
    fleet.pipeline_status(publicKeys=[{"kid": "k1", "key": KEY}])
    assert client.public_keys(timeout=SECONDS) == {"k1": KEY}
    with pytest.raises(WaitTimeout, match="version 3"):
        client.wait_for(3, timeout=0.5)
    fleet.committed(4)
    assert client.wait_for(3, timeout=SECONDS).version == 4


def test_an_order_is_not_waited_for_and_asked_again_finds_its_round(fleet: Fleet, client: Client) -> None:
    how: dict[str, Any] = {"sender_incarnation": INCARNATION, "timeout": SECONDS}
    name = client.order(1, **how)
    (made,) = fleet.rounds()
    assert made["metadata"]["name"] == name
    assert client.order(1, **how) == name
    fleet.fail(name)
    with pytest.raises(SyncFailed):
        client.order(1, **how)
    again = client.order(1, retries=1, **how)
    assert again != name
    assert isinstance(again, str)
    assert client.order(1, **how) == again, "the latest attempt counts"
    fleet.succeed(again)
    done = client.order(1, **how)
    assert isinstance(done, SyncResult)
    assert done.round == again
    assert len(fleet.rounds()) == 2
    fleet.committed(1)
    done = client.order(1, manifest_digest=DIGEST, timeout=SECONDS)
    assert isinstance(done, SyncResult)
    assert done.already_committed
