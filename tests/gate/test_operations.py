"""Operations: once per id, one at a time, and no client's fate matters."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from rlfleet.api.tokens import Scope
from tests.gate.kit import Engine, Gate, Operator, Weights, until


def slow(engine: Engine, path: str, seconds: float = 1.5) -> None:
    """The engine takes its time for one call, so that an operation is in flight for a while."""
    engine.faults(**{path: {"action": "delay", "seconds": seconds, "times": 1}})


def test_the_same_id_joins_the_running_operation_and_later_returns_its_record(
    operator: Operator, engine: Engine
) -> None:
    slow(engine, "pause_generation")
    body = operator.body("Pause")
    first = operator.post(body)
    assert (first.status_code, first.json()["state"]) == (202, "Running")
    again = operator.post(body)
    assert (again.status_code, again.json()["state"]) == (200, "Running")
    record = operator.wait(body["id"])
    assert (record["state"], record["result"]) == ("Succeeded", {"paused": True})
    # A successor under a higher generation asks for the same step: it gets the record, not a second pause.
    successor = Operator(operator.gate, operation=operator.operation, generation=1001)
    known = successor.post(body | {"generation": 1001})
    assert (known.status_code, known.json()) == (200, record)
    assert operator.status()["attempts"] == {"round-1/Pause": 1}


def test_the_same_id_with_another_order_is_a_conflict(operator: Operator) -> None:
    body = operator.body("Pause")
    operator.post(body)
    operator.wait(body["id"])
    changed = body | {"order": {"kind": "Pause", "mode": "Abort"}}
    answer = operator.post(changed)
    assert (answer.status_code, answer.json()["reason"]) == (409, "OperationConflict")


def test_a_second_operation_is_busy_and_named(operator: Operator, engine: Engine) -> None:
    slow(engine, "pause_generation")
    running = operator.start("Pause").json()["id"]
    assert operator.status()["inFlight"] == running
    answer = operator.start("Discard")
    assert (answer.status_code, answer.json()["reason"]) == (409, "Busy")
    assert running in answer.json()["message"]
    operator.wait(running)
    assert "inFlight" not in operator.status()
    operator.ok("Discard")


def test_a_client_that_hangs_up_stops_nothing(operator: Operator, engine: Engine, gate: Gate) -> None:
    slow(engine, "pause_generation")
    body = operator.body("Pause")
    raw = json.dumps(body).encode()
    with socket.create_connection((gate.host, 9440)) as connection:
        connection.sendall(
            b"POST /v1/operations HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {operator.token()}\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
    until("operation logged", lambda: operator.status()["attempts"] == {"round-1/Pause": 1})
    assert operator.wait(body["id"])["state"] == "Succeeded"
    assert engine.ready() == 503


def test_a_poll_waits_for_the_end_and_no_longer(operator: Operator, engine: Engine) -> None:
    slow(engine, "pause_generation", 2.0)
    op_id = operator.start("Pause").json()["id"]
    assert operator.wait(op_id, 0)["state"] == "Running"
    assert operator.wait(op_id, 0.2)["state"] == "Running"
    assert operator.wait(op_id, 30)["state"] == "Succeeded"


def test_poll_arguments_are_checked(operator: Operator) -> None:
    def get(query: str) -> tuple[int, str]:
        answer = operator.gate.http.get(f"/v1/operations/{'0' * 32}{query}", headers=operator.headers(Scope.READ))
        return answer.status_code, answer.json()["reason"]

    assert get("") == (404, "NotFound")
    for query in ("?waitSeconds=x", "?waitSeconds=-1", "?waitSeconds=31", "?waitSeconds=nan"):
        assert get(query) == (400, "Invalid"), query


def test_attempts_count_per_operation_and_kind(operator: Operator) -> None:
    operator.ok("Discard")
    operator.ok("Discard", attempt=2)
    operator.ok("Pause")
    assert operator.status()["attempts"] == {"round-1/Discard": 2, "round-1/Pause": 1}


def test_waiting_requests_survive_a_pause(operator: Operator, engine: Engine) -> None:
    """Closed keeps requests waiting inside the engine: none fails, whatever the mode holds back."""
    weights = Weights.of(3)
    operator.deliver(weights, 3)
    op_id = operator.start("Resume", **operator.names(weights, 3)).json()["id"]
    assert operator.wait(op_id)["state"] == "Succeeded"
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = engine.http.post("/generate", json={"input_ids": [1, 2], "sampling_params": sampling})
    assert answer.json()["meta_info"]["weight_version"] == "3"


def test_wait_mode_drains_first_and_then_retracts_what_is_left(operator: Operator, engine: Engine) -> None:
    record = operator.ok("Pause", mode="Wait", drainSeconds=0)
    assert record["result"] == {"paused": True}
    assert engine.ready() == 503


def test_abort_mode_pauses_too(operator: Operator, engine: Engine) -> None:
    operator.ok("Pause", mode="Abort")
    assert (engine.ready(), operator.status()["engine"]["paused"]) == (503, True)


def test_metrics_count_operations_and_refusals(operator: Operator) -> None:
    operator.ok("Discard")
    operator.refused("Resume", version=1, manifestDigest="sha256:" + "0" * 64)
    text = operator.gate.http.get("/metrics").text
    assert 'rlfleet_gate_operations_total{kind="Discard",state="Succeeded"} 1.0' in text
    assert 'rlfleet_gate_refusals_total{reason="NotProven"} 1.0' in text
    assert "rlfleet_gate_operation_seconds_bucket" in text
    operator.status()
    assert "rlfleet_gate_fence_generation 1000.0" in operator.gate.http.get("/metrics").text


def test_logs_are_json_lines(operator: Operator) -> None:
    operator.ok("Discard")
    process = operator.gate.process
    assert process is not None
    lines: list[dict[str, Any]] = [json.loads(line) for line in process.log.read_text().splitlines()]
    ended = [line for line in lines if line["message"] == "operation ended"]
    assert ended[-1]["kind"] == "Discard"
    assert ended[-1]["state"] == "Succeeded"
    assert all("time" in line and "level" in line for line in lines)


def test_times_are_recorded(operator: Operator) -> None:
    record = operator.ok("Discard")
    now = time.time() * 1000
    assert now - 60_000 < record["startedMs"] <= record["endedMs"] <= now
