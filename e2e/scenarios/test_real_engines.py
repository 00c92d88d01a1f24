"""Rounds with real SGLang and vLLM in the pods of hollow nodes: what they answer is the new weights', and nothing else.

`make test-engines` runs this in a network namespace of its own, once `make engines` has installed the engines.
Engines start from the checkpoint of seed ``DISK``, so that a round which brings the same weights can be held against
an engine that loaded them from disk.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.engines.asking import Answer, RealEngine
from e2e.engines.fixtures import DISK, SEEDS, Expected, expected, models, private_network, start
from e2e.engines.load import Clients
from e2e.engines.prompts import PROMPTS
from e2e.engines.reference import untrue
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_transports import FREE, NODE, TRAIN, pinned

__all__ = ["expected", "models", "private_network"]
pytestmark = [pytest.mark.cluster, pytest.mark.engines]

SYNC: dict[str, Any] = {"deadlines": {"pendingSeconds": 120, "stagingSeconds": 60, "pausedSeconds": 60}}
SERIALIZED = {"mode": "CPUSerialize", "backend": "gloo"}
BROADCAST = {"mode": "Broadcast", "backend": "gloo"}
LONG = 500


def pipeline(fleet: Fleet, transport: dict[str, Any], **sync: Any) -> None:
    """Engines may be on the trainer's devices or not: the test's placement decides."""
    fleet.pipeline(transport=transport, trainer={"gpus": [{"node": NODE, "devices": TRAIN}]}, sync={**SYNC, **sync})


def sync(fleet: Fleet, version: int, seed: int) -> dict[str, Any]:
    done = fleet.sync(version, seed=seed)
    status: dict[str, Any] = done["status"]
    assert status["phase"] == "Succeeded", status
    print(
        f"version {version}: {status['plan'].get('serialized', 0)} serialized, "
        f"{status['plan'].get('broadcast', 0)} broadcast, timings {status['timings']}"
    )
    return status


def in_flight(engine: RealEngine, prompt: list[int], tokens: int) -> Any:
    """Start a request and wait until the engine works on it; a future of its answer."""
    before = engine.running()
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(engine.ask, prompt, tokens)
    wait_until(lambda: asked.done() or engine.running() > before, "the request to run", every=0.01)
    pool.shutdown(wait=False)
    return asked


def test_sglang_takes_both_transports_and_a_request_crosses_the_change(
    fleet: Fleet, models: Any, expected: Expected
) -> None:
    pipeline(fleet, SERIALIZED)
    fleet.trainer(MODEL="llama")
    (engine,) = start(fleet, "SGLang", models, placement=pinned(FREE))
    from_disk = engine.checksum()  # nothing else can be asked: its gate has closed it, since nothing proves it yet
    sync(fleet, -1, 100)
    assert engine.greedy() == expected[100]
    sync(fleet, 1, 101)
    by_bytes = engine.checksum()
    assert engine.greedy() == expected[101]

    pipeline(fleet, BROADCAST)
    status = sync(fleet, 2, DISK)
    assert status["plan"]["broadcast"] == 1
    # Equal to an engine that loaded the same state dict from disk: itself, at its start.
    assert engine.checksum() == from_disk != by_bytes
    # The second prompt is long: answered from blocks of a cache, had anybody left one behind.
    assert engine.greedy() == expected[DISK]

    asked = in_flight(engine, PROMPTS[0], LONG)
    sync(fleet, 3, 101)
    assert engine.checksum() == by_bytes
    answer: Answer = asked.result()
    assert (answer.reason, len(answer.tokens)) == ("length", LONG)
    assert [version for version, _, _ in answer.spans] == ["2", "3"]
    assert untrue(PROMPTS[0], answer.tokens, answer.spans, {"2": DISK, "3": 101}) is None
    assert engine.label() == "3"
    assert engine.greedy() == expected[101]
    digests = fleet.status("rlpipeline", "p")["committed"]["engineDigests"]
    assert [d["digest"] for d in digests] == [by_bytes]


@pytest.mark.slow
def test_sglang_under_load_ends_requests_as_the_mode_says(fleet: Fleet, models: Any, expected: Expected) -> None:
    pipeline(fleet, SERIALIZED)
    fleet.trainer(MODEL="llama")
    (engine,) = start(fleet, "SGLang", models, placement=pinned(FREE))
    sync(fleet, -1, SEEDS[0])
    seeds = {"-1": SEEDS[0]}
    with Clients(lambda prompt: engine.ask(prompt, 60), [PROMPTS[0], PROMPTS[1], PROMPTS[1][:300]]) as clients:
        for version in range(1, 7):
            pipeline(fleet, SERIALIZED if version % 2 else BROADCAST)
            seeds[str(version)] = SEEDS[version % len(SEEDS)]
            sync(fleet, version, seeds[str(version)])
            assert engine.greedy() == expected[seeds[str(version)]]
    assert not clients.failures
    for asked in clients.done:
        assert asked.answer.reason == "length"
        assert untrue(asked.prompt, asked.answer.tokens, asked.answer.spans, seeds) is None
    assert {a.answer.spans[0][0] for a in clients.done} >= {"1", "2", "3", "4", "5"}

    # Wait: a request ends with the weights that it began with.
    pipeline(fleet, SERIALIZED, drainSeconds=60, quiesce={"mode": "Wait"})
    asked_ = in_flight(engine, PROMPTS[0], LONG)
    sync(fleet, 7, SEEDS[0])
    answer: Answer = asked_.result()
    assert (answer.reason, [v for v, _, _ in answer.spans]) == ("length", ["6"])
    # Abort: it ends at once, with what it had. The weights of its tokens are those of one version.
    pipeline(fleet, SERIALIZED, quiesce={"mode": "Abort"})
    asked_ = in_flight(engine, PROMPTS[0], 900)
    sync(fleet, 8, SEEDS[1])
    answer = asked_.result()
    assert (answer.reason, [v for v, _, _ in answer.spans]) == ("abort", ["7"])
    assert len(answer.tokens) < 900
    assert untrue(PROMPTS[0], answer.tokens, answer.spans, {"7": SEEDS[0]}) is None
    assert engine.greedy() == expected[SEEDS[1]]
