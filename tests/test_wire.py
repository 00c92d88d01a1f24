"""The control protocol: what both servers must read, refuse and ignore."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from rlfleet.api import wire
from rlfleet.api.v1alpha1.common import MAX_MEMBERS
from rlfleet.api.v1alpha1.rlpipeline import Deadlines, SyncSpec

FENCE = {"pipeline": "p", "operation": "o", "generation": 7}
ADDRESS = {**FENCE, "podUid": "pod", "incarnation": "inc"}
DIGEST = "sha256:" + "0a" * 32
ID = "0" * 32
TARGET = {"version": 3, "manifestDigest": DIGEST}
GROUP = {"masterAddress": "127.0.0.5", "masterPort": 29500, "groupName": "g", "worldSize": 3, "backend": "gloo"}
PUSH = {"engine": "e-0", "url": "http://127.0.0.5:9440", "podUid": "pod", "buckets": True, "token": "t"}

GATE_ORDERS: list[dict[str, Any]] = [
    {"kind": "Pause"},
    {"kind": "Pause", "mode": "Wait", "drainSeconds": 5},
    {"kind": "Resume", **TARGET},
    {"kind": "Prepare", **TARGET, "transport": "Serialized", "totalBytes": 9},
    {"kind": "Load", **TARGET, "transport": "Broadcast", "group": GROUP, "rankOffset": 1},
    {"kind": "Verify", **TARGET, "expectedEngineDigest": "d"},
    {"kind": "Publish", **TARGET},
    {"kind": "Open"},
    {"kind": "Close"},
    {"kind": "Discard"},
    {"kind": "Probe", "deadlineSeconds": 20.0},
    {"kind": "Release", "tags": ["Weights", "KVCache"], "residualBytes": 13 * 2**30, "budgetSeconds": 60.0},
    {"kind": "Wake", "budgetSeconds": 60.0},
]
SENDER_ORDERS: list[dict[str, Any]] = [
    {"kind": "Push", "manifestDigest": DIGEST, "targets": [PUSH], "deadlineSeconds": 60},
    {"kind": "Broadcast", "manifestDigest": DIGEST, "group": GROUP},
]


def gate_request(order: dict[str, Any]) -> dict[str, Any]:
    return {**ADDRESS, "id": ID, "order": order}


def sender_request(order: dict[str, Any]) -> dict[str, Any]:
    return {**FENCE, "senderIncarnation": "s", "id": ID, "order": order}


@pytest.mark.parametrize("order", GATE_ORDERS, ids=lambda o: o["kind"])
def test_every_order_of_a_gate_can_be_read_and_sent(order: dict[str, Any]) -> None:
    read = wire.OperationRequest.model_validate(gate_request(order))
    assert read.order.kind == order["kind"]
    assert wire.OperationRequest.model_validate(read.wire()) == read
    assert order.items() <= read.wire()["order"].items() or "group" in order


@pytest.mark.parametrize("order", SENDER_ORDERS, ids=lambda o: o["kind"])
def test_every_order_of_a_sender_can_be_read_and_sent(order: dict[str, Any]) -> None:
    read = wire.SenderOperationRequest.model_validate(sender_request(order))
    assert wire.SenderOperationRequest.model_validate(read.wire()) == read


def test_every_order_is_covered_here() -> None:
    kinds = {each["kind"] for each in GATE_ORDERS + SENDER_ORDERS}
    defined = {
        cls.model_fields["kind"].default
        for _, cls in inspect.getmembers(wire, inspect.isclass)
        if issubclass(cls, wire.Request) and "kind" in cls.model_fields
    }
    assert kinds == defined


@pytest.mark.parametrize("order", GATE_ORDERS, ids=lambda o: o["kind"])
def test_an_order_with_something_unknown_is_refused(order: dict[str, Any]) -> None:
    # An older gate must say so instead of carrying out half of what was meant.
    with pytest.raises(ValidationError, match=r"fromTheFuture\n.*Extra inputs"):
        wire.OperationRequest.model_validate(gate_request({**order, "fromTheFuture": 1}))


@pytest.mark.parametrize("order", [{}, {"kind": "Reboot"}, {"kind": "Push", "targets": []}, "Pause", None])
def test_other_orders_are_refused(order: Any) -> None:
    with pytest.raises(ValidationError):
        wire.OperationRequest.model_validate(gate_request(order))


@pytest.mark.parametrize("field", ["pipeline", "operation", "generation", "podUid", "incarnation", "id", "order"])
def test_a_mutating_call_lacks_no_part_of_its_identity(field: str) -> None:
    body = gate_request({"kind": "Pause"})
    del body[field]
    with pytest.raises(ValidationError, match=rf"{field}\n.*Field required"):
        wire.OperationRequest.model_validate(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", 0),
        ("generation", -1),
        ("generation", "seven"),
        ("pipeline", ""),
        ("pipeline", "../../etc"),
        ("podUid", "a/b"),
        ("podUid", "x" * 129),
        ("incarnation", "a b"),
        ("incarnation", "a\n"),
        ("id", "0" * 31),
        ("id", "Z" * 32),
        ("id", "../" + "0" * 29),
        ("attempt", 0),
        ("attempt", 2**31 + 1),
    ],
)
def test_no_text_of_a_request_can_be_a_path_or_grow_without_limit(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        wire.OperationRequest.model_validate({**gate_request({"kind": "Pause"}), field: value})


@pytest.mark.parametrize(
    "url",
    ["", "ftp://h", "http://", "http:///x", "http://h?q", "http://h#f", "http://h /x", "//h", "http://" + "h" * 512],
)
def test_only_plain_http_urls_are_taken(url: str) -> None:
    adapter: TypeAdapter[str] = TypeAdapter(wire.Url)
    with pytest.raises(ValidationError):
        adapter.validate_python(url)


@pytest.mark.parametrize("url", ["http://127.0.0.5:9440", "https://router.example/base", "http://[::1]:1/"])
def test_urls_that_are_taken(url: str) -> None:
    assert TypeAdapter(wire.Url).validate_python(url) == url


def reports() -> list[type[BaseModel]]:
    return [
        cls
        for _, cls in inspect.getmembers(wire, inspect.isclass)
        if issubclass(cls, wire.Report) and cls is not wire.Report
    ]


@pytest.mark.parametrize("report", reports(), ids=lambda cls: cls.__name__)
def test_reports_of_a_newer_server_can_be_read(report: type[BaseModel]) -> None:
    assert report.model_config["extra"] == "ignore"


def test_a_status_with_something_unknown_is_read() -> None:
    status = {"protocolVersion": 1, "podUid": "p", "engine": {"state": "Ready", "new": 1}, "fromTheFuture": {}}
    assert wire.GateStatus.model_validate(status).engine.state is wire.EngineState.READY


def test_a_gate_that_would_refuse_todays_orders_is_told_by_its_status() -> None:
    """Both called theirs protocol 1; only the second one takes a pause that says how long it may last."""
    foundation = {
        "protocolVersion": 1, "gateVersion": "0.1.0", "capabilities": ["Serialized"], "podUid": "p", "enrolled": True,
        "fence": {"pipeline": "", "operation": "", "generation": 0}, "engine": {"state": "Ready"}, "loads": [],
        "uncertain": False, "stagingCapacityBytes": 0, "routed": {}, "devices": {"source": "Unknown"}, "attempts": {},
    }  # fmt: skip
    before = foundation | {"uncertainSeconds": 0.0, "wedged": False, "released": [], "releasing": False}
    assert wire.GateStatus.model_validate_json(json.dumps(foundation)).protocol_version == 0
    assert wire.GateStatus.model_validate_json(json.dumps(before)).protocol_version == 1


def test_what_a_gate_does_not_know_is_not_no() -> None:
    status = wire.GateStatus.model_validate({"protocolVersion": 1, "podUid": "p", "engine": {"state": "Starting"}})
    engine = status.engine
    assert (engine.paused, engine.weight_label, engine.world_size, engine.layout, status.holds) == (None,) * 5
    assert status.devices.source == "Unknown"
    assert "holds" not in status.wire()


def test_refusals_of_the_fence_travel_as_412_and_everything_else_is_a_4xx_or_500() -> None:
    for reason in (
        wire.ErrorReason.STALE_FENCE,
        wire.ErrorReason.OTHER_OPERATION,
        wire.ErrorReason.OTHER_PIPELINE,
        wire.ErrorReason.FENCE_POISONED,
    ):
        assert wire.HTTP_STATUS[reason] == 412
    assert {wire.HTTP_STATUS.get(reason, 409) for reason in wire.ErrorReason} == {
        400,
        401,
        403,
        404,
        409,
        412,
        413,
        500,
    }


PARTS = st.tuples(st.text(max_size=8), st.text(max_size=8), st.integers(1, 1000), st.text(max_size=8)).filter(
    lambda parts: not any("\0" in text for text in (parts[0], parts[1], parts[3]))
)


@given(PARTS, PARTS)
@example(("ab", "c", 1, ""), ("a", "bc", 1, ""))
@example(("a", "b1", 1, ""), ("a", "b", 11, ""))
def test_operation_ids_are_equal_only_for_the_same_step(
    one: tuple[str, str, int, str], two: tuple[str, str, int, str]
) -> None:
    assert (wire.operation_id(*one) == wire.operation_id(*two)) == (one == two)


def test_an_operation_id_is_accepted_by_the_protocol() -> None:
    made = wire.operation_id("o", "Load", 2, "inc")
    assert wire.OperationRequest.model_validate({**gate_request({"kind": "Pause"}), "id": made}).id == made


def test_the_sender_is_told_of_as_many_gates_as_a_round_has_members() -> None:
    order = wire.PushOrder(manifest_digest=DIGEST, targets=(PUSH,) * MAX_MEMBERS, deadline_seconds=1)
    assert len(order.targets) == MAX_MEMBERS


def test_whatever_time_a_pipeline_allows_can_be_ordered() -> None:
    """An order that can not be made would be thought of anew at every look, and its round never end."""
    day, drain = 86_400, 3600
    Deadlines(pending_seconds=day, staging_seconds=day, paused_seconds=day)
    SyncSpec(drain_seconds=drain)
    wire.HoldRequest(**FENCE, version=1, deadline_seconds=day + day + 60 + drain)
    wire.PauseOrder(drain_seconds=drain, budget_seconds=day + drain)
    wire.WakeOrder(budget_seconds=day + drain)


def test_a_round_that_holds_for_days_can_go_on_asking() -> None:
    """Each look of it is another attempt; one that can not be sent would end every look, and nobody could cancel."""
    days = 30 * 86_400
    assert wire.OperationRequest.model_validate(gate_request({"kind": "Pause"}) | {"attempt": days}).attempt == days
