"""A gate beside a worker of the real Dynamo runtime, whose engine is scripted: who it is, paused or not, what loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from e2e.dynamo.fixtures import installed
from e2e.dynamo.runtime import Runtime, Worker
from rlfleet.calls import Refused
from rlfleet.engine.dynamo import DynamoAdapter
from rlfleet.gate.app import Gate as GateApp
from rlfleet.gate.config import load_config
from rlfleet.gate.errors import GateError
from rlfleet.gate.rules import same_instance
from tests.gate.kit import Gate, Operator, Weights, address, until

MakeGate = Callable[..., Gate]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """No frontend: a gate needs none."""
    installed()
    one = Runtime(tmp_path / "dynamo")
    yield one
    one.stop()


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    """What the worker's routes answer instead of what they do; empty at first."""
    return tmp_path / "faults.json"


@pytest.fixture
def worker(runtime: Runtime, faults: Path) -> Worker:
    return runtime.start_worker(RL_FAULTS=str(faults))


@pytest.fixture
def operator(worker: Worker, make_gate: MakeGate) -> Operator:
    return Operator(make_gate(worker.url, RLFLEET_ENGINE_TYPE="Dynamo")).ready()


def test_a_round_step_by_step(operator: Operator, worker: Worker) -> None:
    before = worker.state()
    assert before["paused"], "nothing proves its weights, so its gate closed it"
    weights = Weights.of(1)
    operator.serve(weights, 1)
    status, now = until("told", lambda: (s := operator.status())["engine"].get("weightLabel") and (s, worker.state()))
    assert (status["engine"]["type"], status["engine"]["weightLabel"], status["holds"]["version"]) == ("Dynamo", "1", 1)
    assert (now["version"], now["paused"], now["loads"]) == ("1", False, 1)
    assert now["weights"] != before["weights"]
    assert now["flushes"] > before["flushes"]


def test_another_process_at_the_same_url_is_another_engine(
    operator: Operator, worker: Worker, runtime: Runtime
) -> None:
    operator.serve(Weights.of(1), 1)
    before = operator.status()
    worker.kill()
    until("unreachable", lambda: operator.status()["engine"]["state"] == "Unreachable")
    assert operator.status()["incarnation"] == before["incarnation"], "silence is no other process"
    again = runtime.start_worker(worker.port)
    # Nobody tells the gate: it sees for itself, and closes what nothing proves.
    until("closed", lambda: again.state()["paused"])
    after = until("met", lambda: (s := operator.status())["engine"].get("instance") and s)
    assert after["engine"]["instance"] != before["engine"]["instance"]
    assert after["incarnation"] != before["incarnation"]
    assert "holds" not in after
    late = operator.body("Pause", attempt=9) | {"incarnation": before["incarnation"]}
    assert operator.post(late).json()["reason"] == "IdentityMismatch"


def test_an_error_inside_a_200_is_a_failure_of_that_step(operator: Operator, worker: Worker, faults: Path) -> None:
    weights = Weights.of(2)
    operator.prepare(weights, 2)
    operator.push_all(weights)
    operator.ok("Pause")
    load, names = operator.load_order(weights, 2), operator.names(weights, 2)
    faults.write_text(json.dumps({"update_weights_from_disk": {"status": "error", "message": "disk on fire"}}))
    # The very route that tells whether the worker is paused fails: then nobody knows, and nothing is loaded.
    assert operator.refused("Load", **load) == "NotProven"
    faults.write_text("{}")
    operator.ok("Load", attempt=2, **load)
    operator.ok("Verify", **names)
    faults.write_text(json.dumps({"set_weight_version": None}))
    failed = operator.run("Publish", **names)
    assert (failed["state"], failed["error"]["reason"]) == ("Failed", "EngineRefused")
    assert "holds" not in operator.status()
    assert worker.state()["paused"]


def test_a_version_that_nobody_declared_takes_the_proof_away(operator: Operator, faults: Path) -> None:
    operator.serve(Weights.of(1), 1)
    assert operator.status()["holds"]["version"] == 1
    answer = {"status": "ok", "version": "1", "version_declared": False}
    faults.write_text(json.dumps({"get_weight_version": answer}))
    # A worker that answers late has told nothing yet.
    until("void", lambda: "holds" not in operator.status())


def test_a_process_that_tells_the_right_version_is_still_another_one(
    operator: Operator, worker: Worker, runtime: Runtime, faults: Path
) -> None:
    """Whoever starts it may declare any version; what the record proves is about the process before."""
    weights = Weights.of(1)
    operator.deliver(weights, 1)
    resume = operator.body("Resume", **operator.names(weights, 1))
    faults.write_text(json.dumps({"get_weight_version": {"status": "ok", "version": "1", "version_declared": True}}))
    worker.kill()
    again = runtime.start_worker(worker.port, RL_FAULTS=str(faults))
    answer = operator.post(resume)
    if answer.status_code in (200, 202):
        ended = operator.wait(resume["id"])
        assert (ended["state"], ended["error"]["reason"]) == ("Failed", "IdentityMismatch")
    else:
        assert answer.json()["reason"] == "IdentityMismatch", "its gate had met the new one by then"
    until("closed", lambda: again.state()["paused"])
    assert "holds" not in operator.status()


def test_a_record_is_about_one_process() -> None:
    same_instance("7", "7")
    same_instance(None, "8")
    for told in ("8", None):
        with pytest.raises(GateError) as refused:
            same_instance("7", told)
        assert refused.value.reason == "IdentityMismatch"


class Scripted:
    """What a worker's system server answers, where a test must hold an answer back."""

    def __init__(self) -> None:
        self.instance = "a"
        self.metrics = 200
        self.version_held = asyncio.Event()
        self.version_held.set()
        self.asked_version = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/engine/{route}", self._route)
        return app

    async def _metrics(self, _: web.Request) -> web.Response:
        text = f'dynamo_component_inflight_requests{{dynamo_endpoint="generate",worker_id="{self.instance}"}} 0\n'
        return web.Response(text=text if self.metrics == 200 else "busy", status=self.metrics)

    async def _route(self, request: web.Request) -> web.Response:
        if request.match_info["route"] == "update_weights_from_disk":
            return web.json_response({"status": "error", "message": "Missing 'model_path' in body"})
        if request.match_info["route"] == "get_weight_version":
            self.asked_version += 1
            await self.version_held.wait()
        return web.json_response({"status": "ok", "version": "1", "version_declared": True})


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    one = Scripted()
    runner = web.AppRunner(one.application(), access_log=None)
    await runner.setup()
    host = address()
    await web.TCPSite(runner, host, 8081).start()
    yield one, f"http://{host}:8081"
    one.version_held.set()
    await runner.cleanup()


async def test_metrics_that_can_not_be_read_are_no_answer_of_another_process(scripted: tuple[Scripted, str]) -> None:
    one, url = scripted
    adapter = DynamoAdapter(url)
    try:
        one.metrics = 503
        with pytest.raises(Refused, match="HTTP 503: busy"):
            await adapter.facts(30)
        one.metrics = 200
        await adapter.facts(30)
        assert await adapter.write_label("1", 30) == "1"
        one.metrics = 503
        with pytest.raises(Refused, match="HTTP 503: busy"):
            await adapter.write_label("1", 30)
        one.metrics, one.instance = 200, "b"
        with pytest.raises(Refused, match="instance 11 answers now, the weights were loaded into 10"):
            await adapter.write_label("1", 30)
    finally:
        await adapter.close()


async def test_an_answer_of_the_process_before_that_comes_late_is_no_third_process(
    scripted: tuple[Scripted, str], tmp_path: Path
) -> None:
    one, url = scripted
    files = Gate(tmp_path, url, address(), RLFLEET_ENGINE_TYPE="Dynamo")
    gate = GateApp(load_config(files.env), on_fatal=lambda e: None)
    try:
        gate.store.incarnation = "first"
        await gate.observe_engine()
        assert gate.store.engine_instance == "10"
        one.version_held, before = asyncio.Event(), one.asked_version
        late = asyncio.create_task(gate.observe_engine())
        while one.asked_version == before:
            await asyncio.sleep(0.01)
        # It has the process's name by now, or gets the next one's: then this shows less, and nothing wrong.
        one.instance = "b"
        one.version_held = asyncio.Event()
        one.version_held.set()
        await gate.observe_engine()
        second = gate.store.incarnation
        assert (gate.store.engine_instance, second != "first") == ("11", True)
        await late
        assert (gate.store.engine_instance, gate.store.incarnation) == ("11", second)
    finally:
        await gate.stop()
        files.close()
