"""A gate beside vLLM: the same orders, and what the engine does that SGLang does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gate.kit import Engine, Gate, Operator, Weights, until

MakeGate = Callable[..., Gate]


class VLLM(Engine):
    """The reference engine with vLLM's face."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        super().__init__(directory, "--api", "vllm", *arguments)

    def up(self) -> Engine:
        def ready() -> bool:
            self.process.alive()
            return self.http.get("/version").status_code == 200

        until("engine up", ready)
        return self

    def label(self) -> str:
        return str(self.http.get("/weight_info").json()["weight_version"])

    def generate(self, tokens: int) -> dict[str, Any]:
        body = {"prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        answer = self.http.post("/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., VLLM]]:
    made: list[VLLM] = []

    def make(*arguments: str) -> VLLM:
        made.append(VLLM(tmp_path, *arguments))
        made[-1].up()
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(start: Callable[..., VLLM]) -> VLLM:
    return start()


@pytest.fixture
def gate(engine: VLLM, make_gate: MakeGate) -> Gate:
    return make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")


def test_a_fresh_engine_is_closed_and_opens_only_with_proven_weights(operator: Operator, engine: VLLM) -> None:
    status = operator.status()
    assert (status["engine"]["type"], status["engine"]["version"], status["engine"]["paused"]) == (
        "VLLM",
        "0.32.0",
        True,
    )
    first, second = Weights.of(1), Weights.of(2)
    assert operator.refused("Resume", **operator.names(first, 1)) == "NotProven"
    operator.serve(first, 1)
    old = engine.generate(8)["token_ids"]
    record = operator.next().deliver(second, 2)
    assert record["result"] == {"label": "2"}
    assert engine.label() == "2"
    operator.next().ok("Resume", attempt=2, **operator.names(second, 2))
    assert engine.generate(8)["token_ids"] != old
    back = operator.next("round-3")
    back.generation += 1
    back.serve(first, 3)
    assert engine.generate(8)["token_ids"] == old


def test_an_engine_that_somebody_else_paused_is_closed_as_well(start: Callable[..., VLLM], make_gate: MakeGate) -> None:
    """It never admitted a request before its gate's eyes, and yet says itself that it is paused."""
    engine = start()
    assert engine.http.post("/pause?mode=keep").status_code == 200
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")).ready()
    operator.serve(Weights.of(1), 1)
    assert len(engine.generate(4)["token_ids"]) == 4


@pytest.mark.parametrize(
    ("mode", "end"), [(None, "length"), ("Retract", "length"), ("Wait", "length"), ("Abort", "abort")]
)
def test_what_becomes_of_a_running_request(
    start: Callable[..., VLLM], make_gate: MakeGate, mode: str | None, end: str
) -> None:
    engine = start("--step-ms", "20")
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")).ready()
    operator.serve(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2)
    newer.prepare(weights, 2)
    newer.push_all(weights)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.generate, 200)
        until("it runs", lambda: newer.status()["engine"].get("running") == 1)
        newer.ok("Pause", drainSeconds=60, budgetSeconds=90, **({"mode": mode} if mode else {}))
        held = 0 if mode in ("Abort", "Wait") else 1
        until("it is held", lambda: newer.status()["engine"].get("waiting") == held)
        until("nothing runs", lambda: newer.status()["engine"].get("running") == 0)
        newer.ok("Load", **newer.load_order(weights, 2))
        newer.ok("Verify", **newer.names(weights, 2))
        newer.ok("Publish", **newer.names(weights, 2))
        newer.ok("Resume", **newer.names(weights, 2))
        answer = asked.result()
    assert answer["finish_reason"] == end
    assert (len(answer["token_ids"]) == 200) is (end == "length")


def test_a_load_that_broke_off_is_never_resumed_and_the_next_one_repairs_it(operator: Operator, engine: VLLM) -> None:
    operator.serve(Weights.of(1), 1)
    newer = operator.next()
    wrong = Weights.of(2, rename=lambda name: name.replace("layers.1.", "layers.9."))
    newer.prepare(wrong, 2)
    newer.push_all(wrong)
    newer.ok("Pause")
    record = newer.run("Load", **newer.load_order(wrong, 2))
    assert (record["state"], record["error"]["reason"]) == ("Failed", "EngineRefused")
    assert "no module or parameter named" in record["error"]["message"]
    assert engine.http.post("/weight_checker", json={"action": "checksum"}).status_code == 500
    assert engine.http.get("/health").status_code == 200
    for version, weights in ((1, Weights.of(1)), (2, wrong)):
        assert newer.refused("Resume", **newer.names(weights, version)) == "NotProven"
    good = newer.next("round-3")
    good.serve(Weights.of(2), 3)
    assert len(engine.generate(4)["token_ids"]) == 4


def test_weights_that_miss_a_parameter_are_not_taken_for_whole(operator: Operator) -> None:
    operator.serve(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2).without_last_bucket()
    newer.prepare(weights, 2)
    newer.push_all(weights)
    newer.ok("Pause")
    record = newer.run("Load", **newer.load_order(weights, 2))
    assert record["state"] == "Failed"
    assert "were not sent or not whole" in record["error"]["message"]


def test_buckets_pass_through_one_session(operator: Operator) -> None:
    """Parts of one fused parameter lie in several buckets; loaded one by one they would be lost."""
    whole = Weights.of(2)
    operator.deliver(whole, 2)
    digest = operator.status()["holds"]["engineDigest"]
    newer, weights = operator.next(), Weights.of(2, tensors_per_bucket=1)
    newer.prepare(weights, 3, staging="Bucket")
    assert newer.push_manifest(weights).status_code == 200
    newer.ok("Pause")
    op = str(newer.start("Load", **newer.load_order(weights, 3)).json()["id"])
    for index, data in enumerate(weights.buckets):
        answer = newer.push(f"buckets/{index}", data)
        assert answer.status_code == 200, answer.text
    assert newer.wait(op)["state"] == "Succeeded"
    assert newer.ok("Verify", **newer.names(weights, 3))["result"]["engineDigest"] == digest


def test_a_gate_that_restarts_in_a_load_can_load_again(start: Callable[..., VLLM], make_gate: MakeGate) -> None:
    engine = start()
    gate = make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")
    operator, weights = Operator(gate).ready(), Weights.of(2)
    operator.prepare(weights, 2)
    operator.push_all(weights)
    operator.ok("Pause")
    engine.faults(finish_weight_update={"action": "hang", "times": 1})
    op = operator.start("Load", **operator.load_order(weights, 2)).json()["id"]
    until("the engine holds nothing", lambda: engine.struck("finish_weight_update") == 1)
    gate.kill()
    gate.start()
    assert operator.wait(op)["state"] == "Unknown"
    assert operator.refused("Load", attempt=2, **operator.load_order(weights, 2)) == "Uncertain"
    operator.ok("Pause", attempt=2)
    operator.ok("Load", attempt=2, **operator.load_order(weights, 2))
    operator.ok("Verify", **operator.names(weights, 2))


def test_without_the_plug_in_whole_directories_are_all_that_it_takes(
    start: Callable[..., VLLM], make_gate: MakeGate
) -> None:
    engine = start("--no-plugin")
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")).ready()
    capabilities = operator.status()["capabilities"]
    assert "Serialized" in capabilities
    assert not {"Broadcast", "Serialized/Parts"} & set(capabilities)
    weights = Weights.of(1)
    named = {"version": 1, "manifestDigest": weights.digest, "totalBytes": weights.total}
    record = operator.run("Prepare", transport="Serialized", staging="Bucket", **named)
    assert (record["state"], record["error"]["reason"]) == ("Failed", "Unsupported")
    assert "weight transfer plug-in" in record["error"]["message"]
    served = operator.next()
    served.serve(weights, 1)
    broken = served.next("round-3")
    wrong = Weights.of(2, rename=lambda name: name.replace("layers.1.", "layers.9."))
    broken.prepare(wrong, 2)
    broken.push_all(wrong)
    broken.ok("Pause")
    assert broken.run("Load", **broken.load_order(wrong, 2))["state"] == "Failed"
    # What came of it would be mixed into the next load, and nothing can clear it.
    again = broken.run("Load", attempt=2, **broken.load_order(wrong, 2))
    assert again["state"] == "Failed"
    assert "clearing what an earlier load left behind" in again["error"]["message"]


def test_device_memory_is_given_back_by_the_workers_and_the_engine_stays_paused(
    start: Callable[..., VLLM], make_gate: MakeGate
) -> None:
    engine = start("--enable-memory-saver")
    operator = Operator(make_gate(engine.url, RLFLEET_ENGINE_TYPE="VLLM")).ready()
    weights = Weights.of(1)
    operator.serve(weights, 1)
    newer = operator.next()
    newer.ok("Pause", mode="Abort")
    # To give back the weights alone would take the cache along, and a wake would not know of it.
    refused = newer.start("Release", attempt=2, tags=["Weights"])
    assert (refused.status_code, refused.json()["reason"]) == (409, "Unsupported")
    assert "VLLM gives Weights back only together with KVCache" in refused.json()["message"]
    assert not newer.status().get("released")
    assert newer.ok("Release", attempt=3, tags=["KVCache"])["result"]["released"] == ["KVCache"]
    assert newer.ok("Release", attempt=4, tags=["Weights"])["result"]["released"] == ["KVCache", "Weights"]
    assert newer.refused("Resume", **newer.names(weights, 1)) == "Offloaded"
    newer.ok("Wake")
    # The engine's own wake-up would have let requests run on weights that are gone.
    assert engine.http.get("/is_paused").json() == {"is_paused": True}
    assert newer.refused("Resume", attempt=2, **newer.names(weights, 1)) == "NotProven"
    newer.next("round-3").serve(weights, 2)
    assert len(engine.generate(4)["token_ids"]) == 4


def test_an_engine_that_lies_about_its_pause_is_not_believed(operator: Operator, engine: VLLM) -> None:
    operator.serve(Weights.of(1), 1)
    newer = operator.next()
    engine.faults(pause={"action": "lie"})
    record = newer.run("Pause", budgetSeconds=1.5)
    assert record["state"] == "Failed"
    assert "still not paused" in record["error"]["message"]


def test_with_a_key_only_the_gate_changes_the_engine_and_says_that_it_saw_so(
    start: Callable[..., VLLM], make_gate: MakeGate
) -> None:
    key = {"Authorization": "Bearer key-of-this-pod"}
    engine = start("--admin-api-key", "key-of-this-pod", "--api-key", "users-key")
    gate = make_gate(
        engine.url,
        RLFLEET_ENGINE_TYPE="VLLM",
        RLFLEET_ENGINE_ADMIN_KEY="key-of-this-pod",
        RLFLEET_ENGINE_API_KEY="users-key",
    )
    operator = Operator(gate).ready()
    operator.serve(Weights.of(5), 5)
    until("tried out", lambda: operator.status()["engine"].get("guarded") is True)
    for headers in ({}, {"Authorization": "Bearer users-key"}, operator.headers()):
        for path in ("pause", "collective_rpc", "update_weight_version", "start_weight_update", "sleep"):
            refused = engine.http.post(f"/{path}", json={"new_version": "evil"}, headers=headers)
            assert refused.status_code == 401, path
    assert engine.http.get("/weight_info", headers=key).json() == {"weight_version": "5"}


def test_without_one_anybody_could(operator: Operator) -> None:
    until("tried out", lambda: operator.status()["engine"].get("guarded") is False)
