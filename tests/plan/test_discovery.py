"""What worker discovery says of one engine: identity, what is left out, and what is never promised."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.discovery import RLWorker
from rlfleet.plan.discovery import MAX_ERROR, Naming, Worker, described, failed, in_order, instance_id, is_open
from tests.plan.rounds_kit import DIGEST_A, gate

NAMING = Naming()
HOLDS = (7, DIGEST_A)


def worker(name: str = "e-0", pool: str = "e", **changes: Any) -> Worker:
    fields: dict[str, Any] = {
        "namespace": "team", "pipeline": "p", "pool": pool, "pod": name, "uid": f"uid-{name}",
        "gate_url": f"http://{name}:9440", "engine_url": f"http://{name}:30000",
    }  # fmt: skip
    return Worker(**(fields | changes))


def read(entry: RLWorker) -> Any:
    """As a client reads it."""
    return json.loads(entry.json_bytes())


def test_the_number_of_a_pod_is_the_head_of_its_uids_hash() -> None:
    uid = "3f1c2b9a-8d41-4c0e-9a53-0d6f7e1b2c4d"
    assert instance_id(uid) == int(hashlib.sha256(uid.encode()).hexdigest()[:16], 16) == 0xC35CEC98223FC6E6
    assert instance_id(uid) > 2**63  # no int64 holds it


@given(st.lists(st.uuids().map(str), unique=True, max_size=50))
def test_numbers_are_unsigned_64_bits_and_other_pods_have_others(uids: list[str]) -> None:
    numbers = {instance_id(uid) for uid in uids}
    assert len(numbers) == len(uids)
    assert all(0 <= n < 2**64 for n in numbers)


def test_the_list_is_in_dynamos_order_and_has_everyone_once() -> None:
    some = [worker(f"{pool}-{i}", pool) for pool in ("b", "a") for i in range(20)]
    found = in_order([*some, *some], NAMING)
    assert [(w.pool, w.instance_id) for w in found] == sorted((w.pool, w.instance_id) for w in some)
    assert {w.pool for w in in_order(some, Naming(components=frozenset({"b", "c"})))} == {"b"}


def test_a_worker_that_answers() -> None:
    status = gate(holds=HOLDS, fence=12)
    engine = status.engine.model_copy(update={"model": "Qwen", "world_size": 2, "instance": "12298635699951225666"})
    entry = described(worker(), status.model_copy(update={"engine": engine}), Naming("prod", "admin"))
    assert read(entry) == {
        "namespace": "prod",
        "component": "e",
        "endpoint": "admin",
        "instance_id": instance_id("uid-e-0"),
        "transport": {"http": "http://e-0:9440"},
        "request_plane_url": "dyn://prod.e.admin",
        "system_url": "http://e-0:9440",
        "routes": [],
        "model": "Qwen",
        "world_size": 2,
        "rlfleet": {
            "namespace": "team",
            "pipeline": "p",
            "pod": "e-0",
            "pod_uid": "uid-e-0",
            "engine_url": "http://e-0:30000",
            "fence": 12,
            "open": True,
            "paused": False,
            "instance": "12298635699951225666",
            "version": 7,
            "manifest_digest": DIGEST_A,
        },
    }
    assert json.loads(entry.json_bytes(leaving_out={"rlfleet"})) == {
        k: v for k, v in read(entry).items() if k != "rlfleet"
    }
    RLWorker.model_validate_json(entry.json_bytes())


def test_what_is_not_known_is_left_out() -> None:
    status = gate(paused=None)
    engine = status.engine.model_copy(update={"world_size": None})
    entry = read(described(worker(engine_url=""), status.model_copy(update={"engine": engine}), NAMING))
    assert not {"model", "world_size", "error"} & entry.keys()
    assert not {"version", "manifest_digest", "paused", "engine_url"} & entry["rlfleet"].keys()
    assert None not in [*entry.values(), *entry["rlfleet"].values()]


@pytest.mark.parametrize(
    "status",
    [
        gate(),
        gate(holds=HOLDS, paused=True),
        gate(holds=HOLDS, paused=None),
        gate(holds=HOLDS, uncertain=True),
        gate(holds=HOLDS, routed={"a": True, "b": False}),
        gate(holds=HOLDS, routed={"a": None}),
    ],
    ids=["nothing is proven", "paused", "unknown", "uncertain", "a router does not list it", "a router is unknown"],
)
def test_open_is_what_is_proven_to_serve(status: wire.GateStatus) -> None:
    assert not is_open(status)
    assert is_open(gate(holds=HOLDS, routed={"a": True}))


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (gate(holds=HOLDS, engine=wire.EngineReport(state=wire.EngineState.UNREACHABLE)), "the engine is Unreachable"),
        (gate(engine=wire.EngineReport(state=wire.EngineState.STARTING)), "the engine is Starting"),
        (gate(incarnation=None), "has not met its engine"),
        (gate(enrolled=False), "has not met its engine"),
        (gate(holds=HOLDS, wedged=True), "stuck in a broadcast group"),
    ],
)
def test_an_engine_that_can_not_be_used_is_an_error_however_well_its_gate_is(status: wire.GateStatus, why: str) -> None:
    entry = read(described(worker(), status, NAMING))
    assert why in entry["error"]
    assert entry["routes"] == []
    assert not {"system_url", "world_size"} & entry.keys()
    assert not {"open", "version", "fence"} & entry["rlfleet"].keys()


def test_of_a_worker_that_did_not_answer_only_what_the_apiserver_tells_is_said() -> None:
    entry = read(failed(worker(model="Qwen"), "no\nanswer\u202e \x1b[1m" + "x" * 9999, NAMING))
    assert entry["error"].startswith("no answer  ")
    assert len(entry["error"]) == MAX_ERROR
    assert entry["error"].isprintable()
    assert entry["model"] == "Qwen"
    assert entry["instance_id"] == instance_id("uid-e-0")
    assert not {"system_url", "world_size"} & entry.keys()
    assert failed(worker(), "\n", NAMING).error == "no answer"
