"""Release and Wake against an engine on a simulated device, read by the gate through the driver's interface.

The engine takes half of an 80 GiB device; what is said of memory is what the device shows, not what the engine answers.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.sim.device import ledger, nvml
from tests.gate.kit import SECONDS, Engine, Gate, Operator, Router, Weights, router_entry, until
from tests.gate.test_crash import kill_inside, mark_running

GIB = 2**30
GPU = "GPU-11111111-2222"
LIMIT = 5 * GIB
TAGS = {"Weights", "KVCache", "CudaGraph"}


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of every container on a node with one device."""
    root = tmp_path_factory.mktemp("devices")
    ledger.create(root, GPU, 80 * GIB)
    driver = nvml.build(tmp_path_factory.mktemp("driver"))
    return {ledger.ROOT_ENV: str(root), ledger.VISIBLE_ENV: GPU, "LD_LIBRARY_PATH": str(driver)}


@pytest.fixture
def node(device: dict[str, str]) -> Iterator[dict[str, str]]:
    """The device, its driver well again afterwards."""
    yield device
    fault(device)


@pytest.fixture(scope="session")
def neighbour(device: dict[str, str]) -> ledger.Account:
    """Another tenant: this test's own process."""
    return ledger.Account(ledger.visible(device), "trainer")


@pytest.fixture(scope="module")
def engines(device: dict[str, str]) -> Iterator[list[Engine]]:
    """The engine that tests share, the last of the list."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engines: list[Engine], device: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine with all of its memory; one that a test left without some is followed by a new one."""
    if not engines or engines[-1].process.popen.poll() is not None or held_by(engines[-1], device) < 40 * GIB:
        if engines:
            engines[-1].close()
        arguments = ("--enable-memory-saver", "--mem-fraction-static", "0.5", "--step-ms", "10")
        engines.append(Engine(tmp_path_factory.mktemp("engine"), *arguments, **device).up())
    engines[-1].reset()
    return engines[-1]


def held_by(engine: Engine, device: dict[str, str]) -> int:
    (path,) = ledger.visible(device)
    return ledger.holders(path).get(engine.process.popen.pid, 0)


@pytest.fixture
def gate(engine: Engine, node: dict[str, str], make_gate: Callable[..., Gate]) -> Gate:
    return make_gate(engine.url, **node)


def used(operator: Operator) -> int:
    """Bytes in use by a reading that is not older than this call."""

    def read() -> int | None:
        memory = operator.status()["devices"].get("memory")
        return None if memory is None else int(memory[GPU]["usedBytes"])

    return int(until("memory readable", lambda: (value := read()) is not None and (value,))[0])


def rest(operator: Operator) -> dict[str, Any]:
    """What the gate tells of the engine's memory."""
    status = operator.status()
    return {key: status.get(key) for key in ("released", "releasing", "uncertain", "holds")}


def fault(node: dict[str, str], **codes: int) -> None:
    path = Path(node[ledger.ROOT_ENV]) / "fault"
    path.write_text("".join(f"{function} {code}\n" for function, code in codes.items()))


def test_the_gate_reads_its_devices_from_the_driver(operator: Operator, engine: Engine) -> None:
    devices = operator.status()["devices"]
    assert (devices["source"], devices["node"], devices["uuids"]) == ("NVML", "node-1", [GPU])
    assert devices["memory"][GPU]["totalBytes"] == 80 * GIB
    assert 40 * GIB <= devices["memory"][GPU]["usedBytes"] <= 42 * GIB
    process = devices["processes"][0]
    assert process["pid"] == engine.process.popen.pid
    assert process["name"].startswith("sglang::scheduler")


def test_release_and_wake(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(5)
    operator.serve(weights, 5)
    operator.ok("Pause", attempt=2)
    record = operator.ok("Release", residualBytes=LIMIT)
    assert set(record["result"]["released"]) == TAGS
    assert record["result"]["residual"] == "Ok"
    assert record["result"]["memory"][GPU]["usedBytes"] < GIB
    assert used(operator) < GIB
    assert rest(operator) == {
        "released": record["result"]["released"],
        "releasing": False,
        "uncertain": False,
        "holds": None,
    }
    record = operator.ok("Wake")
    assert set(record["result"]["awake"]) == TAGS
    assert used(operator) > 40 * GIB
    status = operator.status()
    assert (status["engine"]["paused"], status.get("holds"), status.get("released")) == (True, None, [])
    # Its weights are garbage now: what was loaded before is no proof of anything, and only a load opens it again.
    assert status["loads"][-1]["released"] is True
    for kind in ("Verify", "Publish", "Resume"):
        assert operator.refused(kind, attempt=2, **operator.names(weights, 5)) == "NotProven", kind
    again = operator.next()
    again.serve(weights, 5)
    assert again.status()["holds"]["engineDigest"] == engine.checksum()


def test_nothing_that_needs_memory_is_done_without_it(operator: Operator, engine: Engine) -> None:
    weights = Weights.of(5)
    operator.serve(weights, 5)
    operator.ok("Pause", attempt=2)
    operator.ok("Release", tags=["KVCache"])
    for kind in ("Verify", "Publish", "Resume"):
        assert operator.refused(kind, attempt=2, **operator.names(weights, 5)) == "Offloaded", kind
    assert operator.refused("Load", attempt=2, **operator.load_order(weights, 5)) == "Offloaded"
    assert operator.refused("Open") == operator.refused("Probe") == "Offloaded"
    # Not harmful: pausing what is paused, closing, staging bytes for later.
    operator.ok("Pause", attempt=3)
    operator.ok("Close")
    operator.ok("Discard")
    engine.process.alive()
    # A tag that is gone already is not asked for again: that would end the engine.
    assert set(operator.ok("Release", attempt=2)["result"]["released"]) == TAGS
    operator.ok("Wake")
    engine.process.alive()


def test_release_needs_a_paused_idle_engine_out_of_every_router(
    operator: Operator, engine: Engine, router: Router
) -> None:
    operator.enroll([router_entry(router)])
    operator.serve(Weights.of(5), 5)
    operator.ok("Open")
    assert operator.refused("Release") == "NotProven"
    operator.ok("Pause", attempt=2)
    answer = operator.start("Release")
    assert (answer.status_code, answer.json()["reason"]) == (409, "NotProven")
    assert "main" in answer.json()["message"]
    operator.ok("Close")
    operator.ok("Release")


def test_waiting_requests_keep_the_memory(operator: Operator, engine: Engine) -> None:
    operator.serve(Weights.of(5), 5)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 200}}
    caller = threading.Thread(target=lambda: engine.http.post("/generate", json=body))
    caller.start()
    until("request runs", lambda: engine.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
    operator.ok("Pause", attempt=2, mode="Retract")
    answer = operator.start("Release")
    assert (answer.status_code, answer.json()["reason"]) == (409, "NotProven")
    assert "1 waiting" in answer.json()["message"]
    operator.ok("Pause", attempt=3, mode="Abort")
    operator.ok("Release")
    caller.join()
    engine.process.alive()


def test_an_engine_without_the_memory_saver_can_not_be_offloaded(
    tmp_path: Path, node: dict[str, str], make_gate: Callable[..., Gate]
) -> None:
    engine = Engine(tmp_path, **node)
    try:
        operator = Operator(make_gate(engine.up().url, **node)).ready()
        assert "Offload" not in operator.status()["capabilities"]
        answer = operator.start("Release")
        assert (answer.status_code, answer.json()["reason"]) == (409, "Unsupported")
        assert "--enable-memory-saver" in answer.json()["message"]
    finally:
        engine.close()


# ------------------------------------------------------------------------------------------ the engine misbehaves


def test_a_success_that_frees_nothing_is_seen_on_the_device(operator: Operator, engine: Engine) -> None:
    engine.faults(release_memory_occupation={"action": "keep"})
    record = operator.ok("Release", residualBytes=LIMIT, budgetSeconds=1)
    assert record["result"]["residual"] == "High"
    assert record["result"]["memory"][GPU]["usedBytes"] > 40 * GIB
    # The engine said that it gave them back, so that is what it must be asked to take.
    assert set(operator.status()["released"]) == TAGS
    operator.ok("Wake")
    engine.process.alive()


def test_memory_that_comes_back_late_is_waited_for(operator: Operator, engine: Engine) -> None:
    engine.faults(release_memory_occupation={"action": "late", "seconds": 1.0})
    record = operator.ok("Release", residualBytes=LIMIT, budgetSeconds=30)
    assert (record["result"]["residual"], used(operator) < LIMIT) == ("Ok", True)
    operator.ok("Wake")


def test_a_residual_without_a_limit_is_not_judged(operator: Operator) -> None:
    assert operator.ok("Release")["result"]["residual"] == "Unknown"
    operator.ok("Wake")


@pytest.mark.parametrize(
    ("path", "action", "when"),
    [
        ("release_memory_occupation", "hang", "before"),
        ("release_memory_occupation", "http500", "after"),
        ("release_memory_occupation", "http400", "before"),
        ("resume_memory_occupation", "hang", "before"),
        ("resume_memory_occupation", "http400", "after"),
    ],
)
def test_no_yes_leaves_one_tag_unknown_and_the_gate_uncertain(
    operator: Operator, engine: Engine, gate: Gate, path: str, action: str, when: str
) -> None:
    kind = "Wake" if path.startswith("resume") else "Release"
    if kind == "Wake":
        operator.ok("Release")
    before = operator.status().get("released") or []
    engine.faults(**{path: {"action": action, "when": when}})
    record = operator.run(kind, attempt=2, budgetSeconds=1.5)
    assert record["state"] == "Unknown", record
    engine.faults()
    after = rest(operator)
    assert (after["releasing"], after["uncertain"]) == (True, True)
    assert len(after["released"] or []) == max(0, len(before) - 1)
    # A pause settles much, but not this: either call, made for a tag that is where it should go, ends the engine.
    operator.ok("Pause", attempt=9)
    assert operator.status()["uncertain"] is True
    assert operator.refused("Wake", attempt=3) == operator.refused("Release", attempt=3) == "Uncertain"
    gate.kill()
    gate.start()
    assert rest(operator) == after
    engine.process.alive()


def test_an_engine_that_dies_in_a_release_leaves_it_unknown(operator: Operator, engine: Engine) -> None:
    engine.faults(release_memory_occupation={"action": "die"})
    assert operator.run("Release")["state"] == "Unknown"
    assert engine.process.popen.wait(timeout=SECONDS) == -signal.SIGKILL


# ------------------------------------------------------------------------------------------ the device


def test_no_room_to_wake_is_seen_before_the_engine_is_asked(
    operator: Operator, engine: Engine, neighbour: ledger.Account
) -> None:
    operator.ok("Release", residualBytes=LIMIT)
    neighbour.add(60 * GIB)
    record = operator.run("Wake")
    assert (record["state"], record["error"]["reason"]) == ("Failed", "InsufficientMemory")
    assert "trainer" in record["error"]["message"]
    assert "trainer" in json.dumps(operator.status()["devices"]["processes"])
    assert set(operator.status()["released"]) == TAGS
    neighbour.add(-60 * GIB)
    operator.ok("Wake", attempt=2)
    engine.process.alive()


def test_running_out_of_memory_in_a_wake_ends_the_engine(
    operator: Operator, engine: Engine, node: dict[str, str], neighbour: ledger.Account
) -> None:
    """What the look before it is for; where the device can not be read, nobody can look."""
    operator.ok("Release")
    fault(node, nvmlDeviceGetMemoryInfo=15)
    neighbour.add(70 * GIB)
    assert operator.run("Wake")["state"] == "Unknown"
    assert engine.process.popen.wait(timeout=SECONDS) == 1
    assert "out of memory" in engine.process.log.read_text()
    neighbour.add(-70 * GIB)


@pytest.mark.parametrize("code", [15, -1], ids=["lost", "hangs"])
def test_unreadable_memory_is_unknown_and_never_zero(operator: Operator, node: dict[str, str], code: int) -> None:
    fault(node, nvmlDeviceGetMemoryInfo=code)

    def unreadable() -> dict[str, Any] | None:
        devices: dict[str, Any] = operator.status()["devices"]
        return devices if "memory" not in devices else None

    devices = until("unreadable", unreadable)
    assert (devices["source"], devices["uuids"]) == ("Unknown", [])
    assert devices["problem"]
    record = operator.ok("Release", residualBytes=LIMIT, budgetSeconds=5)
    assert (record["result"]["residual"], record["result"].get("memory")) == ("Unknown", None)
    assert set(record["result"]["released"]) == TAGS
    operator.ok("Wake")


# ------------------------------------------------------------------------------------------ the gate dies


@pytest.mark.parametrize("kind", ["Release", "Wake"])
def test_sigkill_while_the_engine_is_asked(operator: Operator, engine: Engine, kind: str) -> None:
    """The proof went before the first release was asked for, so that nothing resumes what may be gone."""
    operator.serve(Weights.of(5), 5)
    operator.ok("Pause", attempt=7)
    if kind == "Wake":
        operator.ok("Release")
    path = "release_memory_occupation" if kind == "Release" else "resume_memory_occupation"
    engine.faults(**{path: {"action": "hang"}})
    op_id = str(operator.start(kind).json()["id"])
    until("engine asked", lambda: operator.status()["releasing"])
    operator.gate.kill()
    engine.faults()
    operator.gate.start()
    record = operator.wait(op_id)
    assert (record["state"], record["error"]["reason"]) == ("Unknown", "Uncertain")
    status = operator.status()
    assert (status["releasing"], status["uncertain"], status.get("holds")) == (True, True, None)
    assert operator.refused("Wake", attempt=2) == "Uncertain"
    engine.process.alive()


@pytest.mark.parametrize("kind", ["Release", "Wake"])
def test_sigkill_between_two_tags_leaves_nothing_unknown(
    operator: Operator, engine: Engine, gate: Gate, kind: str
) -> None:
    """Each step is on disk before and after it: the next order goes on where this one ended."""
    operator.ok("Release", tags=["KVCache", "CudaGraph"])
    op_id = operator.ok(kind, attempt=2)["id"]
    before = operator.status().get("released")
    gate.kill()
    mark_running(gate, op_id)
    gate.start()
    assert operator.wait(op_id)["state"] == "Failed"
    status = operator.status()
    assert (status["uncertain"], status["releasing"], status.get("released")) == (False, False, before)
    operator.ok("Release", attempt=3)
    operator.ok("Wake", attempt=3)
    engine.process.alive()


def test_a_restarted_gate_remembers_what_is_asleep_and_asks_for_no_token(
    operator: Operator, engine: Engine, gate: Gate
) -> None:
    operator.ok("Release")
    gate.kill()
    gate.start()
    status = until("known again", lambda: (s := operator.status()).get("capabilities") and s)
    assert set(status["released"]) == TAGS
    assert status["engine"]["paused"] is True
    operator.ok("Pause", attempt=2)
    engine.process.alive()
    operator.ok("Wake")
    engine.process.alive()


def test_a_pause_that_died_over_released_memory_is_settled_without_reading_it(
    operator: Operator, engine: Engine
) -> None:
    """A checksum, which settles it otherwise, would read weights that are not there."""
    operator.ok("Release")
    kill_inside(operator, engine, "Pause", "pause_generation", attempt=5)
    assert operator.status()["uncertain"] is True
    operator.ok("Pause", attempt=6)
    assert operator.status()["uncertain"] is False
    operator.ok("Wake")
    engine.process.alive()


def test_a_stale_fence_releases_nothing(operator: Operator, engine: Engine) -> None:
    operator.next().fence()
    assert operator.refused("Release") == operator.refused("Wake") == "StaleFence"
    assert used(operator.next()) > 40 * GIB
