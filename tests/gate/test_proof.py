"""Resume, verify and publish go by what was proven, not by what was answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.gate.kit import Engine, Gate, Operator, Weights, address


def test_resume_is_refused_unless_exactly_these_weights_are_proven(operator: Operator, engine: Engine) -> None:
    weights, other = Weights.of(1), Weights.of(2)
    operator.ok("Pause")
    assert operator.refused("Resume", **operator.names(weights, 1)) == "NotProven"
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Load", **operator.load_order(weights, 1))
    assert operator.refused("Resume", **operator.names(weights, 1)) == "NotProven"
    operator.ok("Verify", **operator.names(weights, 1))
    assert operator.refused("Resume", **operator.names(weights, 1)) == "NotProven"
    operator.ok("Publish", **operator.names(weights, 1))
    for wrong in (
        operator.names(weights, 2),
        operator.names(other, 1),
        operator.names(weights, 1) | {"engineDigest": "0" * 64},
    ):
        assert operator.refused("Resume", **wrong) == "NotProven", wrong
    assert engine.ready() == 503
    operator.ok("Resume", **operator.names(weights, 1), engineDigest=engine.checksum())
    assert engine.ready() == 200


def test_an_engine_too_busy_to_tell_its_label_is_looked_at_again(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.ok("Pause")
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Load", **operator.load_order(weights, 1))
    operator.ok("Verify", **operator.names(weights, 1))
    operator.ok("Publish", **operator.names(weights, 1))
    engine.faults(model_info={"action": "hang", "times": 2})
    operator.ok("Resume", **operator.names(weights, 1))
    assert engine.ready() == 200


def test_a_load_takes_the_earlier_proof_away(operator: Operator, engine: Engine) -> None:
    first, second = Weights.of(1), Weights.of(2)
    operator.deliver(first, 1)
    newer = operator.next()
    newer.prepare(second, 2)
    newer.push_all(second)
    # Preparing proves nothing wrong: an aborted round may still go back.
    assert newer.status()["holds"]["version"] == 1
    newer.ok("Pause")
    newer.ok("Load", **newer.load_order(second, 2))
    assert "holds" not in newer.status()
    assert newer.refused("Resume", **newer.names(first, 1)) == "NotProven"
    assert newer.refused("Open") == "NotProven"
    newer.ok("Verify", **newer.names(second, 2))
    newer.ok("Publish", **newer.names(second, 2))
    newer.ok("Resume", **newer.names(second, 2))


def test_a_refused_load_leaves_the_engine_unproven_and_can_be_repeated(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Pause")
    engine.faults(update_weights_from_disk={"action": "http500", "when": "after", "times": 1})
    record = operator.run("Load", **operator.load_order(weights, 1))
    assert (record["state"], record["error"]["reason"]) == ("Failed", "EngineRefused")
    status = operator.status()
    assert status["loads"][-1]["state"] == "Failed"
    assert status["uncertain"] is False
    assert operator.refused("Verify", **operator.names(weights, 1)) == "NotProven"
    operator.ok("Load", attempt=2, **operator.load_order(weights, 1))
    assert [load["state"] for load in operator.status()["loads"]] == ["Failed", "Succeeded"]


def test_load_needs_a_paused_engine(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2)
    newer.prepare(weights, 2)
    newer.push_all(weights)
    assert newer.refused("Load", **newer.load_order(weights, 2)) == "NotProven"
    newer.ok("Pause")
    engine.http.post("/continue_generation", json={}).raise_for_status()  # somebody else
    assert newer.refused("Load", **newer.load_order(weights, 2)) == "NotProven"
    assert [load["version"] for load in newer.status()["loads"]] == [1]
    assert newer.status()["holds"]["version"] == 1


def test_verify_reports_the_engines_checksum_and_that_it_moved(operator: Operator, engine: Engine) -> None:
    operator.deliver(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2)
    newer.prepare(weights, 2)
    newer.push_all(weights)
    newer.ok("Pause")
    before = engine.checksum()
    load = newer.ok("Load", **newer.load_order(weights, 2))
    assert load["result"]["checksumBefore"] == before
    assert load["result"]["bytes"] == weights.total
    result = newer.ok("Verify", **newer.names(weights, 2))["result"]
    assert result == {"engineDigest": engine.checksum(), "changed": True, "meaningful": True, "delivered": True}


def test_a_load_that_answered_success_and_loaded_nothing_is_found(operator: Operator, engine: Engine) -> None:
    """Unknown names are a success for this engine ([the real one] too): only the checksum tells."""
    operator.deliver(Weights.of(1), 1)
    newer = operator.next()
    nothing = Weights.of(2, rename=lambda name: "unknown." + name)
    newer.prepare(nothing, 2)
    newer.push_all(nothing)
    newer.ok("Pause")
    newer.ok("Load", **newer.load_order(nothing, 2))
    record = newer.run("Verify", **newer.names(nothing, 2))
    assert (record["state"], record["error"]["reason"]) == ("Failed", "ChecksumUnchanged")
    assert newer.refused("Publish", **newer.names(nothing, 2)) == "NotProven"


def test_equal_bytes_again_are_no_suspicion(operator: Operator) -> None:
    weights = Weights.of(1)
    operator.deliver(weights, 1)
    newer = operator.next()
    newer.prepare(weights, 2)
    newer.push_all(weights)
    newer.ok("Pause")
    newer.ok("Load", **newer.load_order(weights, 2))
    result = newer.ok("Verify", **newer.names(weights, 2))["result"]
    assert "changed" not in result or result["changed"] is None


def test_verify_compares_with_the_expected_digest(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Pause")
    operator.ok("Load", **operator.load_order(weights, 1))
    record = operator.run("Verify", **operator.names(weights, 1), expectedEngineDigest="0" * 64)
    assert record["error"]["reason"] == "DigestMismatch"
    assert operator.refused("Publish", **operator.names(weights, 1)) == "NotProven"
    operator.ok("Verify", attempt=2, **operator.names(weights, 1), expectedEngineDigest=engine.checksum())


def test_a_flush_that_is_refused_at_first_is_tried_again(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Pause")
    operator.ok("Load", **operator.load_order(weights, 1))
    engine.faults(flush_cache={"action": "http500", "times": 1})
    # 500 is no "not yet": it fails. Asked again it succeeds.
    assert operator.run("Verify", **operator.names(weights, 1))["error"]["reason"] == "EngineRefused"
    operator.ok("Verify", attempt=2, **operator.names(weights, 1))


def test_publish_needs_a_verified_load_of_this_version_and_digest(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.ok("Pause")
    assert operator.refused("Publish", **operator.names(weights, 1)) == "NotProven"
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Load", **operator.load_order(weights, 1))
    assert operator.refused("Publish", **operator.names(weights, 1)) == "NotProven"
    operator.ok("Verify", **operator.names(weights, 1))
    assert operator.refused("Publish", **operator.names(weights, 2)) == "NotProven"
    wrong = operator.names(weights, 1) | {"engineDigest": "0" * 64}
    assert operator.refused("Publish", **wrong) == "DigestMismatch"
    assert engine.label() == "default"


def test_publish_fails_when_the_engine_refuses_the_label(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    operator.push_all(weights)
    operator.ok("Pause")
    operator.ok("Load", **operator.load_order(weights, 1))
    operator.ok("Verify", **operator.names(weights, 1))
    engine.faults(update_weight_version={"action": "http500", "times": 1})
    record = operator.run("Publish", **operator.names(weights, 1))
    assert record["error"]["reason"] == "EngineRefused"
    assert "holds" not in operator.status()
    assert operator.ok("Publish", attempt=2, **operator.names(weights, 1))["result"] == {"label": "1"}


class Swallower(BaseHTTPRequestHandler):
    """Passes everything to the engine but label writes: those it answers with success."""

    engine_url = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/update_weight_version":
            self._answer(200, b'{"success": true, "message": "done"}')
            return
        answer = httpx.request(self.command, self.engine_url + self.path, content=body, timeout=30)
        self._answer(answer.status_code, answer.content)

    do_GET = do_OPTIONS = do_POST

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_publish_fails_when_the_label_does_not_read_back(engine: Engine, make_gate: Callable[..., Gate]) -> None:
    handler = type("Bound", (Swallower,), {"engine_url": engine.url})
    with ThreadingHTTPServer((address(), 30000), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            operator = Operator(make_gate(f"http://{proxy.server_address[0]!s}:30000")).ready()
            weights = Weights.of(1)
            operator.prepare(weights, 1)
            operator.push_all(weights)
            operator.ok("Pause")
            operator.ok("Load", **operator.load_order(weights, 1))
            operator.ok("Verify", **operator.names(weights, 1))
            record = operator.run("Publish", **operator.names(weights, 1))
            assert (record["state"], record["error"]["reason"]) == ("Failed", "EngineRefused")
            assert "default" in record["error"]["message"]
            assert "holds" not in operator.status()
            assert operator.status()["loads"][-1]["published"] is False
        finally:
            proxy.shutdown()
            thread.join()


def test_a_label_that_somebody_else_changed_voids_the_proof(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(1)
    operator.deliver(weights, 1)
    body = {"new_version": "default", "abort_all_requests": False}
    engine.http.post("/update_weight_version", json=body).raise_for_status()
    status = operator.status()
    assert status["engine"]["weightLabel"] == "default"
    assert "holds" not in status
    assert operator.refused("Resume", **operator.names(weights, 1)) == "NotProven"
    # Writing the label back does not bring the proof back.
    engine.http.post("/update_weight_version", json=body | {"new_version": "1"}).raise_for_status()
    assert "holds" not in operator.status()
    assert operator.refused("Resume", **operator.names(weights, 1)) == "NotProven"


def test_resume_itself_reads_the_label(operator: Operator, engine: Engine) -> None:
    """No status call in between: the resume must find the changed label by itself."""
    weights = Weights.of(1)
    operator.deliver(weights, 1)
    order = operator.body("Resume", **operator.names(weights, 1))
    body = {"new_version": "7", "abort_all_requests": False}
    engine.http.post("/update_weight_version", json=body).raise_for_status()
    record = operator.wait(operator.post(order).json()["id"])
    assert (record["state"], record["error"]["reason"]) == ("Failed", "NotProven")
    assert engine.ready() == 503


def test_what_is_not_known_is_absent(operator: Operator, engine: Engine, gate: Gate) -> None:
    engine.close()
    status = operator.status()
    assert status["engine"]["state"] == "Unreachable"
    for fact in ("paused", "weightLabel", "running", "waiting"):
        assert fact not in status["engine"], fact
    # Facts that can not change while the process lives are kept.
    assert status["engine"]["worldSize"] == 1
    record = operator.run("Pause")
    assert record["error"]["reason"] == "EngineUnreachable"
    assert gate.http.get("/readyz").status_code == 503
    assert gate.http.get("/livez").status_code == 200


def test_a_paused_engine_is_still_ready_for_its_pod(operator: Operator, gate: Gate) -> None:
    operator.ok("Pause")
    assert gate.http.get("/readyz").status_code == 200


def test_where_readiness_is_the_router_a_pod_is_not_ready_before_its_first_weights(
    engine: Engine, make_gate: Callable[..., Gate]
) -> None:
    gate = make_gate(engine.url, RLFLEET_READY_WHEN_PROVEN="true")
    operator = Operator(gate).ready()
    answer = gate.http.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "NotProven")
    first, second = Weights.of(1), Weights.of(2)
    operator.deliver(first, 1)
    assert gate.http.get("/readyz").status_code == 200
    # A later load takes the proof away for a while: that must not shake the pod.
    newer = operator.next()
    newer.prepare(second, 2)
    newer.push_all(second)
    newer.ok("Pause")
    newer.ok("Load", **newer.load_order(second, 2))
    assert "holds" not in newer.status()
    assert gate.http.get("/readyz").status_code == 200
