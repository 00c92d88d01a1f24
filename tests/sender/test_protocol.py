"""The sender's control protocol: tokens, fence, identity, idempotent operations, bad input."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlfleet.api import wire
from rlfleet.api.tokens import Scope
from rlfleet.sender import OUTSIDE_CLUSTER, SenderError, WeightSender
from tests.sender.caller import POD_UID, SECONDS, Operator, public, weights
from tests.sender.receiver import Receiver, targets

Make = Callable[..., WeightSender]
Operators = Callable[[WeightSender], Operator]

STRANGER = Ed25519PrivateKey.generate()
READS = ["/v1/status", "/v1/operations/" + "0" * 32, "/v1/manifest/x"]
WRITES = ["/v1/fence", "/v1/hold", "/v1/release", "/v1/operations"]


def reason(answer: Any) -> tuple[int, str]:
    """Status and reason of an error."""
    return answer.status_code, wire.ErrorBody.model_validate_json(answer.content).reason.value


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": STRANGER},
        {"kid": "other"},
        {"audience": ["another-pod"]},
        {"issued_at": int(time.time()) - 3600},
    ],
)
@pytest.mark.parametrize("path", READS + WRITES)
def test_a_token_that_does_not_verify_gets_nothing(
    path: str, wrong: dict[str, Any], sender: WeightSender, operator: Operator
) -> None:
    token = operator.token(**wrong)
    answer = operator.get(path, token) if path in READS else operator.post(path, operator.fence(), token)
    assert reason(answer) == (401, "Unauthenticated")
    assert operator.status().fence == wire.Held()


@pytest.mark.parametrize("path", READS + WRITES)
def test_without_a_token_nothing_is_told(path: str, sender: WeightSender, operator: Operator) -> None:
    method = "GET" if path in READS else "POST"
    for headers in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}):
        answer = operator.http.request(method, sender.url + path, headers=headers, json={})
        assert reason(answer) == (401, "Unauthenticated")
    assert operator.http.get(sender.url + "/livez").status_code == 200


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize("scope", [Scope.READ, Scope.PUSH])
def test_only_control_tokens_change_anything(path: str, scope: Scope, sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(1, weights())
    bodies = {
        "/v1/hold": operator.fence(version=1, deadlineSeconds=9),
        "/v1/operations": operator.request(push_to("http://127.0.0.1:1", manifest.digest)),
    }
    answer = operator.post(path, bodies.get(path, operator.fence()), operator.token(scope))
    assert reason(answer) == (403, "Forbidden")
    assert operator.status().fence == wire.Held()


def push_to(url: str, digest: str) -> wire.PushOrder:
    """A push to one gate."""
    target = wire.PushTarget(engine="e", url=url, pod_uid="e", buckets=True, token="t")
    return wire.PushOrder(manifest_digest=digest, targets=(target,), deadline_seconds=SECONDS)


def test_a_push_token_does_not_read(sender: WeightSender, operator: Operator) -> None:
    for path in READS:
        assert reason(operator.get(path, operator.token(Scope.PUSH))) == (403, "Forbidden")


@pytest.mark.parametrize("field", ["pipeline", "operation", "generation"])
def test_token_and_body_must_agree(field: str, sender: WeightSender, operator: Operator) -> None:
    other: Any = operator.generation + 1 if field == "generation" else "other"
    answer = operator.post("/v1/fence", operator.fence(**{field: other}))
    assert reason(answer) == (403, "Forbidden")
    assert field in answer.json()["message"]
    assert operator.status().fence == wire.Held()


def test_the_fence_rises_and_never_falls(sender: WeightSender, operator: Operator, make_operator: Operators) -> None:
    assert operator.post("/v1/fence", operator.fence()).status_code == 200
    assert operator.status().fence == wire.Held(**operator.fence())
    # Equal is not lower.
    assert operator.post("/v1/fence", operator.fence()).status_code == 200

    later = make_operator(sender)
    later.generation = operator.generation + 1
    assert later.post("/v1/fence", later.fence()).status_code == 200
    stale = operator.post("/v1/fence", operator.fence())
    assert reason(stale) == (412, "StaleFence")
    assert wire.ErrorBody.model_validate_json(stale.content).held == wire.Held(**later.fence())

    same = make_operator(sender)
    same.generation = later.generation
    assert reason(same.post("/v1/fence", same.fence())) == (412, "OtherOperation")

    poison = make_operator(sender)
    poison.generation = int(time.time() * 1000) + 2 * 24 * 3600 * 1000
    assert reason(poison.post("/v1/fence", poison.fence())) == (412, "FencePoisoned")
    assert later.status().fence == wire.Held(**later.fence())


@pytest.mark.parametrize("path", ["/v1/hold", "/v1/release", "/v1/operations"])
def test_a_lower_generation_changes_nothing(
    path: str, sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    manifest = sender.publish(1, weights())
    later = make_operator(sender)
    later.generation = operator.generation + 1
    assert later.hold(1).status_code == 200
    with Receiver() as gate:
        bodies = {
            "/v1/hold": operator.fence(version=1, deadlineSeconds=9),
            "/v1/operations": operator.request(push_to(gate.url, manifest.digest)),
        }
        assert reason(operator.post(path, bodies.get(path, operator.fence()))) == (412, "StaleFence")
        assert gate.manifest is None
    status = later.status()
    assert status.hold is not None
    assert status.hold.operation == later.operation
    assert status.in_flight is None


@pytest.mark.parametrize("path", WRITES)
def test_every_way_in_names_what_is_held_when_it_refuses(
    path: str, sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    manifest = sender.publish(1, weights())
    holder = make_operator(sender)
    holder.generation = operator.generation + 1
    assert holder.hold(1).status_code == 200
    held = holder.fence()
    two_days = 2 * 24 * 3600 * 1000
    for change in (
        {"generation": operator.generation},
        {"generation": holder.generation},
        {"generation": holder.generation + 1, "pipeline": "another-pipeline"},
        {"generation": holder.generation + two_days},
    ):
        other = make_operator(sender)
        for name, value in change.items():
            setattr(other, name, value)
        bodies = {
            "/v1/hold": other.fence(version=1, deadlineSeconds=9),
            "/v1/operations": other.request(push_to("http://127.0.0.1:1", manifest.digest)),
        }
        answer = other.post(path, bodies.get(path, other.fence()))
        assert (answer.status_code, answer.json()["held"]) == (412, held), change
    assert holder.status().fence == wire.Held(**held)


def test_an_answer_that_was_lost_is_asked_for_again_by_a_successor(
    sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    manifest = sender.publish(1, weights())
    with Receiver() as gate:
        body = operator.request(push_to(gate.url, manifest.digest))
        operator.post("/v1/operations", body)  # nobody reads what came of it
        heir = make_operator(sender)
        heir.operation, heir.generation = operator.operation, operator.generation + 1
        assert heir.post("/v1/fence", heir.fence()).status_code == 200
        record = heir.ended(body["id"])
        assert (record.state, record.generation) == (wire.OperationState.SUCCEEDED, operator.generation)
        again = heir.post("/v1/operations", heir.request(push_to(gate.url, manifest.digest)))
        assert (again.status_code, again.json()["id"]) == (200, body["id"])
        # Who was deposed learns nothing new and starts nothing.
        assert reason(operator.post("/v1/operations", body)) == (412, "StaleFence")


def test_another_pipeline_may_only_come_when_nothing_is_held(
    sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    sender.publish(1, weights())
    operator.hold(1)
    other = make_operator(sender)
    other.pipeline, other.generation = "another-pipeline", operator.generation + 1
    assert reason(other.post("/v1/fence", other.fence())) == (412, "OtherPipeline")
    operator.release()
    assert other.post("/v1/fence", other.fence()).status_code == 200


def test_an_order_for_another_process_is_refused_before_the_fence(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(1, weights())
    body = operator.request(push_to("http://127.0.0.1:1", manifest.digest)) | {"senderIncarnation": "another"}
    assert reason(operator.post("/v1/operations", body)) == (409, "IdentityMismatch")
    assert operator.status().fence == wire.Held()


def test_the_same_id_never_runs_twice(sender: WeightSender, operator: Operator, make_operator: Operators) -> None:
    manifest = sender.publish(1, weights())
    with Receiver(freeze=True) as gate:
        order = push_to(gate.url, manifest.digest)
        body = operator.request(order)
        first = operator.post("/v1/operations", body)
        assert first.status_code == 202
        assert gate.reached.wait(SECONDS)
        # A successor with a higher generation and new tokens joins the running operation.
        heir = make_operator(sender)
        heir.operation, heir.generation = operator.operation, operator.generation + 1
        fresh = order.targets[0].model_copy(update={"token": "fresh"})
        again = heir.post("/v1/operations", heir.request(order.model_copy(update={"targets": (fresh,)})))
        assert again.status_code == 202
        assert again.json()["id"] == first.json()["id"]
        assert again.json()["startedMs"] == first.json()["startedMs"]
        assert heir.status().in_flight == body["id"]
        # The same id for other work is a conflict, another id has to wait.
        elsewhere = push_to("http://127.0.0.1:1", manifest.digest)
        assert reason(heir.post("/v1/operations", heir.request(elsewhere))) == (409, "OperationConflict")
        gate.thaw()
        record = heir.ended(body["id"])
        assert record.result["targets"]["e"]["ok"]
        assert gate.tokens == {"t"}
        asked = len(gate.lengths)
        ended = heir.post("/v1/operations", heir.request(order))
        assert ended.status_code == 200
        assert wire.OperationRecord.model_validate_json(ended.content) == record
        assert len(gate.lengths) == asked


def test_one_operation_at_a_time_and_a_deposed_push_gives_way(
    sender: WeightSender, operator: Operator, make_operator: Operators
) -> None:
    manifest = sender.publish(1, weights())
    with Receiver(freeze=True) as frozen, Receiver() as gate:
        body = operator.request(push_to(frozen.url, manifest.digest))
        operator.post("/v1/operations", body)
        assert frozen.reached.wait(SECONDS)
        second = operator.request(push_to(gate.url, manifest.digest), attempt=2)
        busy = operator.post("/v1/operations", second)
        assert reason(busy) == (409, "Busy")
        assert body["id"] in busy.json()["message"]
        heir = make_operator(sender)
        heir.operation, heir.generation = operator.operation, operator.generation + 1
        order = wire.PushOrder(
            manifest_digest=manifest.digest, targets=targets({"e": gate}, heir.push_token), deadline_seconds=SECONDS
        )
        assert heir.run(order, attempt=2).result["targets"]["e"]["ok"]
        stopped = heir.ended(body["id"])
        assert stopped.state is wire.OperationState.FAILED
        assert stopped.error is not None
        assert stopped.error.reason is wire.ErrorReason.TRANSPORT_FAILED
        frozen.thaw()


def test_closing_in_the_middle_of_a_push_ends(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(1, weights())
    with Receiver(freeze=True) as frozen:
        operator.post("/v1/operations", operator.request(push_to(frozen.url, manifest.digest)))
        assert frozen.reached.wait(SECONDS)
        sender.close()
        frozen.thaw()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", sender.port), timeout=SECONDS)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/fence", {}, "pipeline"),
        ("/v1/fence", {"generation": 0}, "generation"),
        ("/v1/fence", {"extra": 1}, "extra"),
        ("/v1/fence", {"operation": "../../etc/passwd"}, "operation"),
        ("/v1/hold", {"version": -2, "deadlineSeconds": 1}, "version"),
        ("/v1/hold", {"version": 1, "deadlineSeconds": 0}, "deadlineSeconds"),
        ("/v1/hold", {"version": 1, "deadlineSeconds": 1, "manifestDigest": "md5:1"}, "manifestDigest"),
        ("/v1/operations", {"senderIncarnation": "x", "id": "short", "order": {"kind": "Push"}}, "id"),
        ("/v1/operations", {"senderIncarnation": "x", "id": "0" * 32, "order": {"kind": "Dance"}}, "order"),
    ],
)
def test_bad_bodies_are_named(
    path: str, body: dict[str, Any], names: str, sender: WeightSender, operator: Operator
) -> None:
    answer = operator.post(path, (operator.fence() | body) if body else {})
    assert reason(answer) == (400, "Invalid")
    assert names in answer.json()["message"]
    assert operator.status().fence == wire.Held()


def test_odd_requests_have_answers_of_the_protocol(sender: WeightSender, operator: Operator) -> None:
    bearer = {"Authorization": f"Bearer {operator.token()}"}
    post = operator.http.post
    assert reason(post(sender.url + "/v1/fence", content=b"{", headers=bearer)) == (400, "Invalid")
    assert reason(post(sender.url + "/v1/fence", content=b"x" * (17 * 2**20), headers=bearer)) == (413, "TooLarge")
    assert reason(post(sender.url + "/v1/nothing", headers=bearer)) == (404, "NotFound")
    assert reason(operator.get("/v1/fence")) == (404, "NotFound")
    assert reason(operator.get("/v1/operations/" + "0" * 32)) == (404, "NotFound")
    for seconds in ("x", "-1", "inf", "nan"):
        path = f"/v1/operations/{'0' * 32}?waitSeconds={seconds}"
        assert reason(operator.get(path)) == (400, "Invalid")


def test_status_says_who_it_is(make_sender: Make, make_operator: Operators) -> None:
    sender = make_sender(devices=("node-1", ["GPU-1", "GPU-2"]), backends=("gloo", "nccl"))
    status = make_operator(sender).status()
    assert status.protocol_version == wire.PROTOCOL_VERSION
    assert (status.pod_uid, status.incarnation) == (POD_UID, sender.incarnation)
    assert status.capabilities == ("Serialized", "Broadcast/gloo", "Broadcast/nccl")
    # No driver here: what was declared is told, and that no memory can be read.
    assert (status.devices.source, status.devices.node) == ("Declared", "node-1")
    assert status.devices.uuids == ("GPU-1", "GPU-2")
    assert status.devices.memory is None
    assert "NVML" in status.devices.problem
    assert status.cache is None
    assert make_sender().incarnation != sender.incarnation


def test_keys_may_come_later_and_change(key: Ed25519PrivateKey, make_sender: Make, make_operator: Operators) -> None:
    sender = make_sender(public_keys=None)
    operator = make_operator(sender)
    answer = operator.get("/v1/status")
    assert reason(answer) == (401, "Unauthenticated")
    assert "status.publicKeys" in answer.json()["message"]
    sender.set_public_keys({"k1": public(key)})
    assert operator.status().cache is None
    sender.set_public_keys({"k2": public(STRANGER)})
    assert reason(operator.get("/v1/status")) == (401, "Unauthenticated")


def test_a_source_of_keys_is_asked_when_needed(
    key: Ed25519PrivateKey, make_sender: Make, make_operator: Operators
) -> None:
    keys: dict[str, str] = {}
    asked: list[int] = []

    def source() -> dict[str, str]:
        asked.append(1)
        if not keys:
            raise RuntimeError("the operator has not written any yet")
        return keys

    sender = make_sender(public_keys=source)
    operator = make_operator(sender)
    assert reason(operator.get("/v1/status")) == (401, "Unauthenticated")
    keys["k1"] = public(key)
    until = time.monotonic() + SECONDS
    while operator.get("/v1/status").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    known = len(asked)
    operator.status()
    assert len(asked) == known
    # Without a token nobody makes us ask.
    operator.http.get(sender.url + "/v1/status")
    assert len(asked) == known


def test_a_taken_address_is_named(make_sender: Make) -> None:
    taken = make_sender()
    with pytest.raises(SenderError, match=f"cannot listen on 127.0.0.1:{taken.port}: .*a port that is free"):
        WeightSender("127.0.0.1", taken.port).start()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        WeightSender("127.0.0.1", bucket_bytes=0)
    with pytest.raises(ValueError, match="backends: 'mpi'"):
        WeightSender("127.0.0.1", backends=("mpi",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pod_uid"):
        WeightSender("127.0.0.1", pod_uid="")
    assert WeightSender("127.0.0.1").pod_uid == OUTSIDE_CLUSTER


def test_metrics(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(7, weights())
    with Receiver() as gate:
        order = wire.PushOrder(
            manifest_digest=manifest.digest, targets=targets({"e": gate}, operator.push_token), deadline_seconds=SECONDS
        )
        operator.run(order)
    text = operator.http.get(sender.url + "/metrics").text
    assert "rlfleet_sender_version 7.0" in text
    assert 'rlfleet_sender_operations_total{kind="Push",state="Succeeded"} 1.0' in text
    assert f'rlfleet_sender_moved_bytes_total{{kind="Push"}} {float(manifest.total_bytes)}' in text
