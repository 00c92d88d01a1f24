"""Who may call: every refusal happens before anything is stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rlfleet.api.tokens import Scope
from tests.gate.kit import KEY, OTHER_KEY, Gate, Operator, Weights, public


def fence_body(operator: Operator, generation: int, operation: str = "intruder") -> dict[str, Any]:
    return {"pipeline": operator.pipeline, "operation": operation, "generation": generation}


def stored(operator: Operator) -> tuple[Any, ...]:
    """What an unauthenticated or mismatched call could have changed."""
    status = operator.status()
    return status["fence"], status["attempts"], status.get("staged"), status["enrolled"], status["incarnation"]


BAD_TOKENS: dict[str, tuple[Callable[[Operator], dict[str, str]], int, str]] = {
    "no token": (lambda o: {}, 401, "Unauthenticated"),
    "not a bearer": (lambda o: {"Authorization": f"Basic {o.token()}"}, 401, "Unauthenticated"),
    "empty bearer": (lambda o: {"Authorization": "Bearer"}, 401, "Unauthenticated"),
    "not a token": (lambda o: {"Authorization": "Bearer abc.def"}, 401, "Unauthenticated"),
    "unknown key": (
        lambda o: Operator(o.gate, generation=5000, operation="intruder", key=OTHER_KEY, kid="k2").headers(),
        401,
        "Unauthenticated",
    ),
    "known key id, other key": (
        lambda o: Operator(o.gate, generation=5000, operation="intruder", key=OTHER_KEY).headers(),
        401,
        "Unauthenticated",
    ),
    "wrong audience": (
        lambda o: o.headers(audience=["pod-other"], generation=5000, operation="intruder"),
        401,
        "Unauthenticated",
    ),
    "expired": (
        lambda o: o.headers(issued_at=int(time.time()) - 3600, generation=5000, operation="intruder"),
        401,
        "Unauthenticated",
    ),
    "issued in the future": (
        lambda o: o.headers(issued_at=int(time.time()) + 3600, generation=5000, operation="intruder"),
        401,
        "Unauthenticated",
    ),
    "scope read": (lambda o: o.headers(Scope.READ, generation=5000, operation="intruder"), 403, "Forbidden"),
    "scope push": (lambda o: o.headers(Scope.PUSH, generation=5000, operation="intruder"), 403, "Forbidden"),
    "other operation": (lambda o: o.headers(generation=5000, operation="mine"), 403, "Forbidden"),
    "other generation": (lambda o: o.headers(generation=4999, operation="intruder"), 403, "Forbidden"),
    "other pipeline": (
        lambda o: o.headers(generation=5000, operation="intruder", pipeline="theirs"),
        403,
        "Forbidden",
    ),
}


def test_refused_tokens_store_nothing(operator: Operator) -> None:
    http, before = operator.gate.http, stored(operator)
    for name, (headers, status, reason) in BAD_TOKENS.items():
        fenced = http.post("/v1/fence", json=fence_body(operator, 5000), headers=headers(operator))
        assert (fenced.status_code, fenced.json()["reason"]) == (status, reason), name
        order = operator.body("Discard") | fence_body(operator, 5000)
        started = http.post("/v1/operations", json=order, headers=headers(operator))
        assert (started.status_code, started.json()["reason"]) == (status, reason), name
        assert stored(operator) == before, name


def test_enroll_needs_a_control_token_of_this_pipeline_and_generation(operator: Operator) -> None:
    before = stored(operator)
    body = {
        "pipeline": operator.pipeline,
        "generation": 5000,
        "podUid": operator.gate.pod_uid,
        "pool": "evil",
        "engine": "evil",
        "engineUrl": "http://127.0.0.1:1",
    }
    for headers, status in (
        ({}, 401),
        (operator.headers(Scope.READ, generation=5000), 403),
        (operator.headers(generation=4999), 403),
        (operator.headers(generation=5000, pipeline="other"), 403),
    ):
        answer = operator.gate.http.post("/v1/enroll", json=body, headers=headers)
        assert answer.status_code == status
    assert stored(operator) == before
    assert operator.status()["pool"] == "pool"


@pytest.mark.parametrize("path", ["/v1/status", "/v1/operations/" + "0" * 32])
def test_reading_needs_a_token_but_not_a_push_token(operator: Operator, path: str) -> None:
    http = operator.gate.http
    assert http.get(path).status_code == 401
    assert http.get(path, headers=operator.headers(Scope.PUSH)).status_code == 403
    assert http.get(path, headers=operator.headers(Scope.READ)).status_code in (200, 404)


def test_probes_need_no_token(operator: Operator) -> None:
    for path in ("/livez", "/startupz", "/readyz", "/metrics"):
        assert operator.gate.http.get(path).status_code == 200, path


def test_push_needs_a_push_token_of_exactly_this_operation_and_generation(operator: Operator) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    manifest = weights.manifest.model_dump_json(by_alias=True)

    def put(**claims: Any) -> httpx.Response:
        scope = claims.pop("scope", Scope.PUSH)
        url = f"/v1/staging/{operator.operation}/manifest"
        return operator.gate.http.put(url, content=manifest, headers=operator.headers(scope, **claims))

    assert put(scope=Scope.CONTROL).json()["reason"] == "Forbidden"
    assert put(operation="round-0").json()["reason"] == "Forbidden"
    assert put(generation=999).json()["reason"] == "StaleFence"
    assert put(generation=1001).json()["reason"] == "NotStaged"
    assert put(pipeline="other").json()["reason"] == "OtherOperation"
    assert "staged" in operator.status()
    assert operator.status()["staged"]["manifestReceived"] is False
    assert put().status_code == 200
    assert operator.status()["staged"]["manifestReceived"] is True


def test_an_older_sender_process_cannot_push_whatever_token_it_has(operator: Operator, gate: Gate) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1, senderIncarnation="trainer-2")
    manifest = weights.manifest.model_dump_json(by_alias=True)

    def push(path: str, content: Any, sender: str | None) -> httpx.Response:
        headers = operator.headers(Scope.PUSH) | ({"Rlfleet-Sender": sender} if sender else {})
        return gate.http.put(f"/v1/staging/{operator.operation}/{path}", content=content, headers=headers)

    for older in ("trainer-1", None):
        answer = push("manifest", manifest, older)
        assert (answer.status_code, answer.json()["reason"]) == (409, "IdentityMismatch"), older
    assert push("manifest", manifest, "trainer-2").status_code == 200
    assert push("buckets/0", weights.buckets[0], "trainer-1").status_code == 409
    gate.kill()
    gate.start()
    assert push("buckets/0", weights.buckets[0], "trainer-1").status_code == 409
    assert push("buckets/0", weights.buckets[0], "trainer-2").status_code == 200


def test_enroll_rotates_the_keys_for_good(operator: Operator, gate: Gate) -> None:
    assert operator.enroll(publicKeys={"k2": public(OTHER_KEY)}).status_code == 200
    rotated = Operator(gate, key=OTHER_KEY, kid="k2")
    assert rotated.status()["enrolled"] is True
    assert gate.http.get("/v1/status", headers=operator.headers(Scope.READ)).status_code == 401
    gate.kill()
    gate.start()
    assert rotated.status()["enrolled"] is True
    assert gate.http.get("/v1/status", headers=operator.headers(Scope.READ)).status_code == 401


def test_malformed_rotated_keys_are_refused_and_keep_the_old(operator: Operator) -> None:
    answer = operator.enroll(publicKeys={"k2": "not base64"})
    assert (answer.status_code, answer.json()["reason"]) == (400, "Invalid")
    assert operator.key is KEY
    assert operator.status()["enrolled"] is True
