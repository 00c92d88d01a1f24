"""The one-token probe, the withdrawal of a proof, and checksums that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.gate.kit import Engine, Gate, Operator, Weights, until


def test_a_probe_is_the_engines_own_greedy_token(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    tokens = [operator.ok("Probe", attempt=n)["result"]["token"] for n in (1, 2)]
    body = {"input_ids": [1, 2, 3, 5, 8, 13, 21], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    assert tokens == engine.http.post("/generate", json=body).json()["output_ids"] * 2


def test_only_a_resumed_engine_is_probed(operator: Operator) -> None:
    assert operator.refused("Probe") == "NotProven"
    weights = Weights.of(1)
    operator.deliver(weights, 1)
    assert operator.refused("Probe") == "NotProven"
    operator.ok("Resume", **operator.names(weights, 1))
    operator.ok("Probe")


def test_a_probe_that_fails_or_waits_changes_nothing(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    engine.faults(generate={"action": "http500"})
    record = operator.run("Probe")
    assert (record["state"], record["error"]["reason"]) == ("Failed", "EngineRefused")
    engine.faults(generate={"action": "hang"})
    record = operator.run("Probe", attempt=2, deadlineSeconds=0.5)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "DeadlineExceeded")
    status = operator.status()
    assert (status["uncertain"], status["holds"]["version"], status["engine"]["paused"]) == (False, 1, False)


def test_a_token_of_another_version_is_refused(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    order = operator.body("Probe")
    body = {"new_version": "7", "abort_all_requests": False}
    engine.http.post("/update_weight_version", json=body).raise_for_status()
    record = operator.wait(operator.post(order).json()["id"])
    assert (record["state"], record["error"]["reason"]) == ("Failed", "EngineRefused")
    assert "7" in record["error"]["message"]


def test_a_withdrawn_proof_opens_nothing_until_the_next_load(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.serve(weights, 1)
    operator.ok("Pause", attempt=2, withdrawProof=True)
    status = operator.status()
    assert "holds" not in status
    assert [(load["verified"], load["published"]) for load in status["loads"]] == [(False, False)]
    assert engine.ready() == 503
    for kind, order in (("Resume", operator.names(weights, 1)), ("Open", {}), ("Publish", operator.names(weights, 1))):
        assert operator.refused(kind, attempt=2, **order) == "NotProven", kind
    operator.ok("Load", attempt=2, **operator.load_order(weights, 1))
    operator.ok("Verify", attempt=2, **operator.names(weights, 1))
    operator.ok("Publish", attempt=2, **operator.names(weights, 1))
    operator.ok("Resume", attempt=2, **operator.names(weights, 1))


def test_a_pause_mode_that_the_engine_lacks_is_refused_and_touches_nothing(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    newer = operator.next()
    answer = newer.start("Pause", mode="Keep")
    assert (answer.status_code, answer.json()["reason"]) == (409, "Unsupported")
    assert "quiesce.mode" in answer.json()["message"]
    assert engine.ready() == 200
    newer.ok("Pause")  # without a mode: the engine type's own


def test_checksums_that_hash_nothing_are_not_claimed(tmp_path: Path, make_gate: Callable[..., Gate]) -> None:
    engine = Engine(tmp_path, "--empty-checksums")
    try:
        gate = make_gate(engine.up().url)
        operator = Operator(gate).ready()
        assert "Checksum" not in operator.status()["capabilities"]
        weights = Weights.of(1)
        operator.deliver(weights, 1)
        result = operator.wait(operator.body("Verify", **operator.names(weights, 1))["id"])["result"]
        assert (result["meaningful"], result.get("engineDigest")) == (False, None)
        # Known for the process's life: a gate that restarts does not have a serving engine hash itself again.
        gate.kill()
        engine.faults(weights_checker={"action": "http500"})
        gate.start()
        until("facts", lambda: "Serialized" in operator.status()["capabilities"])
        assert "Checksum" not in operator.status()["capabilities"]
    finally:
        engine.close()
