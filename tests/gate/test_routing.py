"""The start-up promise, opening and closing, against the real sglang-router."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.gate.kit import Engine, Gate, Operator, Router, Weights, router_entry, until


def opened(operator: Operator, router: Router) -> Weights:
    """Deliver a version, resume and open."""
    weights = Weights.of(1)
    operator.serve(weights, 1)
    operator.ok("Open")
    return weights


def test_own_url_in_a_router_at_first_start_is_removed_before_the_engine_may_start(
    engine: Engine, router: Router, make_gate: Callable[..., Gate]
) -> None:
    router.add(engine.url)  # left by an earlier owner of the address
    until("router lists it", lambda: router.urls() == [engine.url])
    operator = Operator(make_gate(engine.url))
    assert operator.gate.startupz().status_code == 503
    operator.enroll([router_entry(router)])
    until("promise", lambda: operator.gate.startupz().status_code == 200)
    assert router.urls() == []
    status = operator.status()
    assert status["routed"] == {"main": False}
    assert len(status["incarnation"]) == 32
    assert "startup" not in status


def test_the_lists_must_stay_empty_for_the_quiet_time(
    engine: Engine, router: Router, make_gate: Callable[..., Gate]
) -> None:
    operator = Operator(make_gate(engine.url, RLFLEET_ROUTER_QUIET_SECONDS="2"))
    operator.enroll([router_entry(router)])
    until("counting", lambda: operator.gate.startupz().json().get("reason") == "NotProven")
    router.add(engine.url)  # the late job of an earlier owner
    until("removed again", lambda: "just removed" in operator.gate.startupz().json().get("message", ""))
    until("promise", lambda: operator.gate.startupz().status_code == 200)
    assert router.urls() == []


def test_a_router_that_does_not_answer_keeps_the_engine_waiting_under_its_name(
    engine: Engine, router: Router, make_gate: Callable[..., Gate]
) -> None:
    assert router.process is not None
    router.process.popen.send_signal(signal.SIGSTOP)
    operator = Operator(make_gate(engine.url))
    operator.enroll([router_entry(router)])

    def blocked() -> bool:
        answer = operator.gate.startupz()
        return answer.status_code == 503 and answer.json()["reason"] == "RouterUnreachable"

    until("blocked", blocked)
    status = operator.status()
    assert status["startup"]["reason"] == "RouterUnreachable"
    assert "main" in status["startup"]["message"]
    assert status["routed"].get("main") is None
    assert "incarnation" not in status
    # Proven gone counts as done.
    operator.enroll([router_entry(router, gone=True)])
    until("promise", lambda: operator.gate.startupz().status_code == 200)
    router.process.popen.send_signal(signal.SIGCONT)


def test_a_router_that_demands_a_key_gets_the_one_of_its_name_and_refusals_are_told(
    engine: Engine, make_gate: Callable[..., Gate], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    behind = Router(tmp_path, "SGLangRouter", "--api-key", "secret-of-the-router")
    behind.http.headers["Authorization"] = "Bearer secret-of-the-router"
    try:
        behind.start()
        operator = Operator(make_gate(engine.url, RLFLEET_ROUTER_KEYS_DIR=str(keys)))
        # A replica bears its pod's name, too; the key is that of all of them.
        operator.enroll([{**router_entry(behind), "name": "main:router-7f"}])

        def says(text: str) -> bool:
            return text in operator.gate.startupz().json().get("message", "")

        until("what to do", lambda: says("shown none: name the Secret"))
        assert "adminKeySecretRef" in operator.status()["routerRefusals"]["main:router-7f"]
        (keys / "main").write_text("mistyped\n")
        until("what to do next", lambda: says("does not take the key"))
        (keys / "main").write_text("secret-of-the-router\n")
        until("promise", lambda: operator.gate.startupz().status_code == 200)
        opened(operator, behind)
        assert behind.urls() == [engine.url]
        status = operator.status()
        assert (status["routed"], status["routerRefusals"]) == ({"main:router-7f": True}, {})
        operator.ok("Close")
        assert behind.urls() == []
    finally:
        behind.close()


def test_connections_to_routers_that_left_the_pool_are_closed(
    engine: Engine, router: Router, make_gate: Callable[..., Gate]
) -> None:
    operator = Operator(make_gate(engine.url)).ready([router_entry(router)])
    gate = operator.gate.process
    assert gate is not None
    assert router.process is not None

    def connected() -> bool:
        to = (router.host, router.port)
        return any(
            c.raddr == to for c in psutil.Process(gate.popen.pid).net_connections("tcp") if c.status == "ESTABLISHED"
        )

    until("connected", lambda: operator.status() and connected())
    operator.enroll([])
    operator.status()
    assert not connected()


def test_no_router_is_legal(operator: Operator) -> None:
    operator.serve(Weights.of(1), 1)
    operator.ok("Open")
    operator.ok("Close")
    assert operator.status()["routed"] == {}


def test_open_ends_when_the_router_serves_and_close_when_it_does_not(
    operator: Operator, router: Router, engine: Engine
) -> None:
    operator.enroll([router_entry(router)])
    assert operator.refused("Open") == "NotProven"
    opened(operator, router)
    assert router.urls() == [engine.url]
    assert operator.status()["routed"] == {"main": True}
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = router.http.post("/generate", json={"input_ids": [1], "sampling_params": sampling})
    assert answer.json()["meta_info"]["weight_version"] == "1"
    operator.ok("Open", attempt=2)  # listed already
    assert router.urls() == [engine.url]
    operator.ok("Close")
    assert router.urls() == []
    operator.ok("Close", attempt=2)  # absent already
    assert operator.status()["routed"] == {"main": False}


def test_a_router_that_lists_the_engine_and_sends_it_nothing_is_told(
    operator: Operator, router: Router, engine: Engine
) -> None:
    operator.enroll([{**router_entry(router), "metrics": router.metrics}])
    opened(operator, router)
    assert operator.status().get("shunned", {}) == {}
    engine.faults(generate={"action": "http500"})
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}

    def refused() -> bool:
        return router.http.post("/generate", json=body).status_code == 503

    until("its circuit breaker to open", refused)
    until("the gate to hear of it", lambda: operator.status().get("shunned") == {"main": "its circuit breaker is open"})
    assert operator.status()["routed"] == {"main": True}
    metrics = operator.gate.http.get("/metrics").text
    assert "rlfleet_gate_shunning_routers 1.0" in metrics


def test_a_paused_engine_is_not_opened(operator: Operator, router: Router) -> None:
    operator.enroll([router_entry(router)])
    operator.deliver(Weights.of(1), 1)
    record = operator.run("Open")
    assert record["error"]["reason"] == "NotProven"
    assert router.urls() == []


def test_a_gate_restart_beside_a_routed_engine_touches_no_entry(
    operator: Operator, router: Router, engine: Engine, gate: Gate
) -> None:
    operator.enroll([router_entry(router)])
    opened(operator, router)
    gate.kill()
    gate.start()
    assert gate.startupz().status_code == 200
    assert router.urls() == [engine.url]
    assert gate.stop() == 0
    assert router.urls() == [engine.url]


def test_a_router_that_does_not_answer_fails_open_and_close(operator: Operator, router: Router, engine: Engine) -> None:
    operator.enroll([router_entry(router)])
    operator.serve(Weights.of(1), 1)
    router.close()
    for kind in ("Open", "Close"):
        record = operator.run(kind, deadlineSeconds=1)
        assert (record["state"], record["error"]["reason"]) == ("Failed", "RouterUnreachable"), kind
        assert "main" in record["error"]["message"]
    routed: dict[str, Any] = operator.status()["routed"]
    assert routed.get("main") is None
    operator.enroll([router_entry(router, gone=True)])
    operator.ok("Close", attempt=2)


def test_an_interrupted_open_is_settled_by_a_close_that_waits_out_late_jobs(
    operator: Operator, router: Router, engine: Engine, gate: Gate
) -> None:
    operator.enroll([router_entry(router)])
    operator.serve(Weights.of(1), 1)
    engine.faults(health={"action": "delay", "seconds": 1.0, "times": 1})  # the router's job takes a while
    op_id = operator.start("Open").json()["id"]
    until("in flight", lambda: operator.status().get("inFlight") == op_id)
    gate.kill()
    gate.start()
    assert operator.status()["uncertain"] is True
    operator.ok("Pause", attempt=2)
    assert operator.status()["uncertain"] is True  # a pause says nothing about the router's job
    operator.ok("Close")
    assert operator.status()["uncertain"] is False
    assert router.urls() == []


def test_another_pipeline_needs_the_engine_out_of_every_router(operator: Operator, router: Router, gate: Gate) -> None:
    operator.enroll([router_entry(router)])
    opened(operator, router)
    operator.ok("Pause", attempt=2)
    taker = Operator(gate, "other-uid", "repair-1", 2000)
    assert taker.fence().json()["reason"] == "OtherPipeline"
    operator.ok("Close")
    assert taker.fence().status_code == 200
