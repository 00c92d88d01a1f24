"""A gate that dies: what it stored stays, what has no recorded end is Unknown, and the engine is left alone."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from tests.gate.kit import Engine, Gate, Operator, Router, Weights, router_entry, until


def kill_inside(operator: Operator, engine: Engine, kind: str, path: str, **order: Any) -> str:
    """SIGKILL the gate while ``kind`` waits for the engine's answer to ``path``; restart it."""
    engine.faults(**{path: {"action": "hang"}})
    op_id = str(operator.start(kind, **order).json()["id"])
    until(f"{path} hangs at the engine", lambda: engine.struck(path))
    assert operator.status().get("inFlight") == op_id
    operator.gate.kill()
    engine.faults()
    operator.gate.start()
    return op_id


def test_restart_keeps_everything_and_touches_nothing(operator: Operator, engine: Engine, gate: Gate) -> None:
    weights = Weights.of(5)
    operator.deliver(weights, 5)
    operator.ok("Resume", **operator.names(weights, 5))
    before = operator.status()
    assert gate.stop() == 0
    assert engine.ready() == 200
    gate.start()
    assert gate.startupz().status_code == 200
    after = operator.status()
    for key in ("incarnation", "fence", "holds", "loads", "attempts", "enrolled", "pool", "staged", "uncertain"):
        assert after.get(key) == before.get(key), key
    assert after["uncertain"] is False
    assert engine.ready() == 200
    assert after["engine"]["paused"] is False


def test_a_paused_engine_stays_paused_through_sigkill_and_sigterm(
    operator: Operator, engine: Engine, gate: Gate
) -> None:
    operator.ok("Pause")
    gate.kill()
    gate.start()
    assert operator.status()["engine"]["paused"] is True
    assert gate.stop() == 0
    assert engine.ready() == 503
    gate.start()
    assert operator.status()["engine"]["paused"] is True


STEPS: dict[str, tuple[str, Callable[[Operator, Weights], dict[str, Any]]]] = {
    "Pause": ("pause_generation", lambda o, w: {}),
    "Load": ("update_weights_from_disk", lambda o, w: o.load_order(w, 6)),
    "Verify": ("flush_cache", lambda o, w: o.names(w, 6)),
    "Publish": ("update_weight_version", lambda o, w: o.names(w, 6)),
    "Resume": ("continue_generation", lambda o, w: o.names(w, 6)),
}


@pytest.mark.parametrize("kind", list(STEPS))
def test_sigkill_inside_an_operation(operator: Operator, engine: Engine, kind: str) -> None:
    weights = Weights.of(6)
    path, order = STEPS[kind]
    operator.prepare(weights, 6)
    operator.push_all(weights)
    for step in ("Pause", "Load", "Verify", "Publish"):
        if step == kind:
            break
        operator.ok(step, **STEPS[step][1](operator, weights))
    op_id = kill_inside(operator, engine, kind, path, **order(operator, weights))

    status = operator.status()
    record = operator.wait(op_id)
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "Uncertain")
    assert status["uncertain"] is True
    assert "inFlight" not in status
    assert operator.gate.startupz().status_code == 200
    if kind == "Load":
        assert status["loads"][-1]["state"] == "Unknown"
        assert "holds" not in status
    # Asking again with the same id does not start it again.
    again = operator.post(operator.body(kind, **order(operator, weights)))
    assert (again.status_code, again.json()["state"]) == (200, "Unknown")
    # Allowed: status, fence, enroll. Refused: everything that could build on the unknown.
    assert operator.fence().status_code == 200
    assert operator.enroll().status_code == 200
    for refused in ("Prepare", "Load", "Verify", "Publish", "Resume", "Open", "Discard"):
        arguments = {
            "Prepare": {
                "transport": "Serialized",
                "version": 6,
                "manifestDigest": weights.digest,
                "totalBytes": weights.total,
            },
            "Load": operator.load_order(weights, 6),
            "Open": {},
            "Discard": {},
        }.get(refused, operator.names(weights, 6))
        assert operator.refused(refused, attempt=2, **arguments) == "Uncertain", refused
    operator.ok("Close", attempt=2)
    assert operator.status()["uncertain"] is True
    # A verified pause with the engine proven idle settles it; what the operation did stays unknown.
    operator.ok("Pause", attempt=3)
    assert operator.status()["uncertain"] is False
    assert operator.wait(op_id)["state"] == "Unknown"
    if kind == "Load":
        assert operator.status()["loads"][-1]["state"] == "Unknown"
        assert operator.refused("Verify", **operator.names(weights, 6)) == "NotProven"
        assert operator.refused("Resume", **operator.names(weights, 6)) == "NotProven"


@pytest.mark.parametrize("kind", ["Probe", "Prepare"])
def test_what_touches_no_engine_has_failed_and_leaves_nothing_unknown(
    operator: Operator, engine: Engine, kind: str
) -> None:
    """A probe changes nothing; what a Prepare left is put in order at the start."""
    weights = Weights.of(6)
    operator.serve(weights, 6)
    if kind == "Probe":
        op_id = kill_inside(operator, engine, kind, "generate")
    else:
        order = {"transport": "Serialized", "version": 7, "manifestDigest": weights.digest, "totalBytes": weights.total}
        op_id = str(operator.start("Prepare", attempt=2, **order).json()["id"])
        operator.wait(op_id)
        operator.gate.kill()
        mark_running(operator.gate, op_id)
        operator.gate.start()
    record, status = operator.wait(op_id), operator.status()
    assert (record["state"], status["uncertain"]) == ("Failed", False)
    assert status["holds"]["version"] == 6
    operator.ok("Probe", attempt=3)


def mark_running(gate: Gate, op_id: str) -> None:
    """As a SIGKILL right after its start would have left the operation: files are written faster than we can strike."""
    with contextlib.closing(sqlite3.connect(gate.state / "gate.sqlite")) as db:
        (text,) = db.execute("SELECT record FROM operations WHERE id = ?", (op_id,)).fetchone()
        record = json.loads(text) | {"state": "Running", "ended_ms": None, "error": None, "result": {}}
        db.execute("UPDATE operations SET record = ? WHERE id = ?", (json.dumps(record), op_id))
        db.commit()


def test_a_close_that_died_is_settled_by_a_close_and_not_by_a_pause(
    operator: Operator, router: Router, gate: Gate
) -> None:
    operator.enroll([router_entry(router)])
    operator.serve(Weights.of(6), 6)
    operator.ok("Open")
    op_id = operator.ok("Close")["id"]
    gate.kill()
    mark_running(gate, op_id)
    gate.start()
    assert operator.status()["uncertain"] is True
    operator.ok("Pause", attempt=2)
    assert operator.status()["uncertain"] is True
    operator.ok("Close", attempt=2)
    assert operator.status()["uncertain"] is False


def test_a_load_that_died_heals_by_a_new_load(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    operator.prepare(weights, 6)
    operator.push_all(weights)
    operator.ok("Pause")
    kill_inside(operator, engine, "Load", "update_weights_from_disk", **operator.load_order(weights, 6))
    # The bytes survived in the memory volume: no second push.
    staged = operator.status()["staged"]
    assert (staged["complete"], staged["receivedBytes"]) == (True, weights.total)
    operator.ok("Pause", attempt=2)
    operator.ok("Load", attempt=2, **operator.load_order(weights, 6))
    operator.ok("Verify", attempt=2, **operator.names(weights, 6))
    operator.ok("Publish", attempt=2, **operator.names(weights, 6))
    assert operator.status()["holds"]["engineDigest"] == engine.checksum()


def test_an_engine_that_does_not_prove_to_be_idle_keeps_the_gate_uncertain(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    operator.prepare(weights, 6)
    operator.push_all(weights)
    operator.ok("Pause")
    kill_inside(operator, engine, "Load", "update_weights_from_disk", **operator.load_order(weights, 6))
    engine.faults(weights_checker={"action": "http500"})
    operator.ok("Pause", attempt=2)
    assert operator.status()["uncertain"] is True


def test_an_engine_call_without_an_answer_is_unknown_without_any_crash(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(6)
    operator.prepare(weights, 6)
    operator.push_all(weights)
    operator.ok("Pause")
    engine.faults(update_weights_from_disk={"action": "hang"})
    record = operator.run("Load", **operator.load_order(weights, 6), transportSeconds=0.5)
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "DeadlineExceeded")
    status = operator.status()
    assert status["uncertain"] is True
    assert status["loads"][-1]["state"] == "Unknown"
    assert operator.refused("Prepare", **operator.load_order(weights, 6), totalBytes=1, attempt=2) == "Uncertain"


def test_staging_survives_but_half_received_buckets_do_not(operator: Operator, gate: Gate) -> None:
    weights = Weights.of(4)
    operator.prepare(weights, 4)
    operator.push_manifest(weights)
    operator.push("buckets/1", weights.buckets[1])
    gate.kill()
    (gate.staging / "receiving" / "77.part").write_bytes(b"half")
    gate.start()
    staged = operator.status()["staged"]
    assert staged["receivedBytes"] == len(weights.buckets[1])
    assert not list((gate.staging / "receiving").iterdir())
    operator.push_all(weights)
    assert operator.status()["staged"]["complete"] is True


def test_an_unreadable_state_stops_the_gate(operator: Operator, gate: Gate) -> None:
    gate.kill()
    for file in gate.state.iterdir():
        file.unlink()
    (gate.state / "gate.sqlite").write_bytes(b"this is not a database" * 100)
    gate.process = None
    with pytest.raises(AssertionError, match="can not be used"):
        gate.start()


def test_two_gates_can_not_share_one_state(operator: Operator, gate: Gate, make_gate: Callable[..., Gate]) -> None:
    with pytest.raises(AssertionError, match="can not be used"):
        make_gate(gate.engine_url, RLFLEET_STATE_DIR=str(gate.state))
    assert operator.status()["enrolled"] is True
