"""An engine whose container restarts in its pod (adopted pods): the gate learns of it from an enrolment."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlfleet.api.wire import EnrollRequest, PauseMode
from rlfleet.engine import View
from rlfleet.gate.errors import GateError
from rlfleet.gate.pausing import pause_engine
from rlfleet.gate.rules import is_another_process
from rlfleet.gate.store import Store
from tests.gate.kit import Engine, Gate, Operator, Weights, until


@pytest.fixture
def serving(operator: Operator) -> Operator:
    """A gate that was told of container c1, whose engine serves version 1."""
    assert operator.enroll(engineProcess="c1").status_code == 200
    operator.serve(Weights.of(1), 1)
    return operator


def test_another_container_is_another_incarnation_and_proves_nothing(serving: Operator, engine: Engine) -> None:
    before = serving.status()
    assert (before["engineProcess"], before["holds"]["version"], engine.ready()) == ("c1", 1, 200)
    assert serving.enroll(engineProcess="c2").status_code == 200
    after = serving.status()
    assert after["engineProcess"] == "c2"
    assert after["incarnation"] != before["incarnation"]
    assert "holds" not in after
    assert after["loads"] == []
    assert after["fence"] == before["fence"], "the fence outlives every engine"
    until("closed", lambda: engine.ready() == 503)
    late = serving.body("Pause", attempt=9) | {"incarnation": before["incarnation"]}
    assert serving.post(late).json()["reason"] == "IdentityMismatch"


def test_the_same_container_told_again_changes_nothing(serving: Operator, engine: Engine) -> None:
    before = serving.status()
    for told in ({"engineProcess": "c1"}, {}, {"engineProcess": "c1"}):
        assert serving.enroll(**told).status_code == 200
    after = serving.status()
    assert (after["incarnation"], after["holds"]) == (before["incarnation"], before["holds"])
    assert engine.ready() == 200


def test_a_container_from_before_is_told_by_whoever_lags_behind_and_closes_nobody(
    serving: Operator, engine: Engine, gate: Gate
) -> None:
    """A new leader whose view of pods is old names the container before this one; names have no order."""
    assert serving.enroll(engineProcess="c2").status_code == 200
    serving.serve(Weights.of(2), 2)
    before = serving.status()
    assert serving.enroll(engineProcess="c1").status_code == 200
    gate.kill()
    gate.start()
    assert serving.enroll(engineProcess="c1").status_code == 200
    after = serving.status()
    assert (after["incarnation"], after["holds"]) == (before["incarnation"], before["holds"])
    assert after["engineProcess"] == "c2"
    assert engine.ready() == 200
    assert serving.enroll(engineProcess="c3").status_code == 200
    assert serving.status()["incarnation"] != before["incarnation"]


def test_what_was_known_outlives_the_gate_and_an_enrolment_that_does_not_say(serving: Operator, gate: Gate) -> None:
    before = serving.status()["incarnation"]
    assert serving.enroll().status_code == 200
    gate.kill()
    gate.start()
    assert serving.status()["engineProcess"] == "c1"
    assert serving.enroll(engineProcess="c2").status_code == 200
    assert serving.status()["incarnation"] != before


def test_the_first_that_is_told_is_the_one_that_was_met() -> None:
    assert not is_another_process(None, "c1")
    assert not is_another_process("c1", None)
    assert not is_another_process("c1", "c1")
    assert is_another_process("c1", "c2")
    assert is_another_process("c2", "c3", ["c1"])
    assert not is_another_process("c2", "c1", ["c1"])


def test_an_enrolment_without_a_container_has_the_digest_that_it_always_had() -> None:
    told = {"pipeline": "p", "generation": 1, "pod_uid": "u", "pool": "a", "engine": "a-0", "engine_url": "http://h:1"}
    plain = EnrollRequest(**told)
    assert "engineProcess" not in plain.wire()
    assert plain.digest() == "acc7f98a97092c66c4525b833715764e"
    assert EnrollRequest(**told, engine_process="c1").digest() != plain.digest()
    router = {"name": "main", "type": "SGLangRouter", "url": "http://r:1"}
    behind = EnrollRequest(**{**told, "routers": (router,)})
    assert behind.digest() == "62760f64719cfc55dd6a64970487df01"
    assert EnrollRequest(**{**told, "routers": ({**router, "metrics": "http://r:2"},)}).digest() != behind.digest()


# What the kernel tells: the kubelet is late, and most engines do not say which process of theirs answers.


def test_a_process_that_nobody_told_of_is_met_by_its_socket(serving: Operator, engine: Engine, gate: Gate) -> None:
    before = serving.status()
    engine.restart()
    until("another incarnation", lambda: serving.status()["incarnation"] != before["incarnation"])
    until("closed", lambda: engine.ready() == 503)
    met = serving.status()
    assert "holds" not in met
    assert met["loads"] == []
    assert (met["fence"], met["engineProcess"]) == (before["fence"], "c1")
    # Told late, it is the one that was met, also by a gate that was restarted meanwhile.
    gate.kill()
    gate.start()
    assert serving.enroll(engineProcess="c2").status_code == 200
    told = serving.status()
    assert (told["incarnation"], told["engineProcess"]) == (met["incarnation"], "c2")
    # Only once: the next name is another process, though the gate met none.
    assert serving.enroll(engineProcess="c3").status_code == 200
    assert serving.status()["incarnation"] != met["incarnation"]


def test_a_process_that_came_while_the_gate_was_away_is_met(serving: Operator, engine: Engine, gate: Gate) -> None:
    before = serving.status()["incarnation"]
    gate.kill()
    engine.restart()
    gate.start()
    assert serving.status()["incarnation"] != before
    until("closed", lambda: engine.ready() == 503)


def test_an_order_for_the_process_before_does_not_reach_the_one_that_has_just_come(
    serving: Operator, engine: Engine
) -> None:
    late = serving.body("Pause", attempt=9)
    engine.restart()
    assert serving.post(late).json()["reason"] == "IdentityMismatch"


def test_what_was_paused_before_it_was_told_stays_closed_and_catches_up(serving: Operator, engine: Engine) -> None:
    """The pause is of the process that the kubelet tells of later; forgotten, none could be told from an ill engine."""
    engine.restart()
    until("closed", lambda: serving.status()["engine"].get("paused") is True)
    assert serving.enroll(engineProcess="c2").status_code == 200
    assert serving.status()["engine"]["paused"] is True
    serving.serve(Weights.of(2), 2)
    assert engine.ready() == 200


def test_names_that_are_told_late_one_after_the_other_forget_no_pause_of_the_process_that_is_here(
    serving: Operator, engine: Engine
) -> None:
    """Its engine ended twice while the operator was away, whose first look at pods is behind the kubelet."""
    engine.restart()
    until("met", lambda: "holds" not in serving.status())
    engine.restart()
    until("closed", lambda: serving.status()["engine"].get("paused") is True)
    for name in ("c2", "c3"):
        assert serving.enroll(engineProcess=name).status_code == 200
    told = serving.status()
    assert (told["engineProcess"], told["engine"].get("paused")) == ("c3", True)
    serving.serve(Weights.of(2), 2)
    assert engine.ready() == 200


def test_a_name_that_was_told_before_its_process_came_vouches_for_no_later_one(
    serving: Operator, engine: Engine
) -> None:
    """A socket may outlive engines: that of a proxy in front of them. Then their containers' names alone tell."""
    before = serving.status()["incarnation"]
    engine.kill()
    assert serving.enroll(engineProcess="c2").status_code == 200
    told = serving.status()["incarnation"]
    assert told != before
    engine.start()
    until("met", lambda: serving.status()["incarnation"] != told)
    serving.serve(Weights.of(2), 2)
    assert serving.enroll(engineProcess="c3").status_code == 200
    assert "holds" not in serving.status()
    until("closed", lambda: engine.ready() == 503)


def test_a_pause_is_not_recorded_for_the_process_that_follows_the_one_that_was_paused(
    serving: Operator, engine: Engine, gate: Gate
) -> None:
    """An engine that still starts does not admit requests either, and begins to when it is ready."""
    engine.faults(server_info={"action": "hang"})
    started = serving.start("Pause", attempt=9, mode="Retract")
    until("paused, the scheduler asked", lambda: engine.ready() == 503 and engine.struck("server_info"))
    assert gate.process is not None
    gate.process.popen.send_signal(signal.SIGSTOP)
    engine.restart()
    engine.http.post("/pause_generation", json={}).raise_for_status()  # it looks as one that still starts
    gate.process.popen.send_signal(signal.SIGCONT)
    record = serving.wait(started.json()["id"])
    assert record["state"] != "Succeeded"
    assert "another engine process" in record["error"]["message"]
    assert "paused" not in serving.status()["engine"], "whether it is paused is not known"


def test_a_pause_that_began_before_the_process_came_counts_for_it_and_not_for_the_one_before(
    serving: Operator, engine: Engine
) -> None:
    """The order waits for an engine that is not there and meets the next one, before anybody looks who listens."""
    before = serving.status()["incarnation"]
    late = serving.body("Pause", attempt=9)
    engine.kill()
    assert serving.post(late).status_code == 202
    engine.start()
    record = serving.wait(late["id"])
    assert record["state"] != "Succeeded", "it was for the process before"
    assert "another engine process" in record["error"]["message"]
    assert engine.ready() == 503
    met = serving.status()
    assert met["incarnation"] != before
    assert met["engine"]["paused"] is True
    assert serving.enroll(engineProcess="c2").status_code == 200
    serving.serve(Weights.of(2), 2)
    assert engine.ready() == 200


@pytest.mark.parametrize("paused", [True, False])
async def test_one_that_comes_while_the_one_before_is_looked_at_is_not_paused(tmp_path: Path, *, paused: bool) -> None:
    """It still starts, so nobody has seen it admit requests: nobody could tell afterwards that it is only paused."""
    store = Store(tmp_path)
    store.engine_listener = "a"
    store.saw_admitting("a")
    store.put_paused(paused, "a")
    here = SimpleNamespace(listener="a", orders=[])

    async def view(_: float) -> View:
        here.listener = "b"
        return View(reachable=True, admitting=False)

    async def heal(_: float) -> bool:
        return False

    async def pause(*_: object, still: Callable[[], None], **__: object) -> None:
        still()
        here.orders.append("pause")

    adapter = SimpleNamespace(view=view, heal_readiness=heal, pause=pause, tells_pause=False)
    ctx: Any = SimpleNamespace(store=store, engine=SimpleNamespace(adapter=adapter, listener=lambda: here.listener))
    with pytest.raises(GateError, match="process ended"):
        await pause_engine(ctx, PauseMode.RETRACT, drain_seconds=0, budget=5)
    assert here.orders == []
    store.close()


def test_an_engine_that_ends_while_it_drains_leaves_the_next_one_alone(serving: Operator, engine: Engine) -> None:
    """Nobody could tell afterwards whether that one is paused or ill."""
    engine.faults(**{"v1/loads": {"action": "hang"}})  # whether anything still runs is not known
    started = serving.start("Pause", attempt=9, mode="Wait", drainSeconds=30)
    assert started.status_code == 202, started.text
    until("drains", lambda: engine.struck("v1/loads") >= 4)
    engine.restart()
    assert serving.wait(started.json()["id"])["state"] != "Succeeded"
    until("closed, and known to be", lambda: serving.status()["engine"].get("paused") is True)
