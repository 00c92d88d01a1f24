"""Rounds with real SGLang and vLLM in the pods of hollow nodes: what they answer is the new weights', and nothing else.

`make test-engines` runs this in a network namespace of its own, once `make engines` has installed the engines; CI runs
what is not marked slow. Engines start from the checkpoint of seed ``DISK``, so that a round which brings the same
weights can be held against an engine that loaded them from disk.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.engines.asking import RealEngine
from e2e.engines.fixtures import (
    BROADCAST,
    DISK,
    RUNS,
    SEEDS,
    SERIALIZED,
    Expected,
    pipeline,
    start,
    sync,
)
from e2e.engines.load import Asked, Clients
from e2e.engines.prompts import PROMPTS
from e2e.engines.reference import untrue
from e2e.engines.serving import CONTEXT
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.test_transports import FREE, pinned

pytestmark = RUNS

#: About as many tokens as fit behind the short prompt (SGLang gives a little less): seconds, in which a round can come.
LONG = CONTEXT - 24


def waited_for(fleet: Fleet, engine: RealEngine, seeds: dict[str, int]) -> None:
    """A round finds a request and lets it end first. It tries for the reason of crossing()."""
    for attempt in range(4):
        last = max(int(v) for v in seeds)
        seeds[str(last + 1)] = SEEDS[attempt % 2]
        fleet.publish(last + 1, seed=seeds[str(last + 1)])
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engine.ask, PROMPTS[0], LONG // 2)
            wait_until(lambda: asked.done() or engine.running(), "the request to run", every=0.01)  # noqa: B023
            name = fleet.order(last + 1)
            found = not asked.done()
            status = fleet.ended(name)["status"]
            assert status["phase"] == "Succeeded", status
            answer = asked.result()
        assert (answer.reason, [version for version, _, _ in answer.spans]) == ("length", [str(last)])
        assert untrue(PROMPTS[0], answer.tokens, answer.spans, seeds) is None
        if found:
            return
    pytest.fail("every request had ended before its round")


def cut_off(fleet: Fleet, engine: RealEngine, seeds: dict[str, int]) -> list[Asked]:
    """Requests that a round aborted, of which every token is true. It tries for the reason of crossing()."""
    for attempt in range(4):
        last = max(int(v) for v in seeds)
        seeds[str(last + 1)] = SEEDS[1 + attempt % 2]
        with Clients(lambda prompt: engine.ask(prompt, LONG), [PROMPTS[0], PROMPTS[0]]) as clients:
            wait_until(lambda: engine.running() or clients.done or clients.failures, "requests to run", every=0.01)
            sync(fleet, last + 1, seeds[str(last + 1)])
        assert not clients.failures
        for asked in clients.done:
            assert asked.answer.reason in ("abort", "length")
            assert untrue(asked.prompt, asked.answer.tokens, asked.answer.spans, seeds) is None
        aborted = [asked for asked in clients.done if asked.answer.reason == "abort"]
        assert all(version == str(last) for asked in aborted for version, _, _ in asked.answer.spans)
        if aborted:
            return aborted
    pytest.fail("no request met a round")


def crossing(fleet: Fleet, engine: RealEngine, seeds: dict[str, int], others: tuple[int, int]) -> None:
    """Whole answers of which the first tokens are one version's and the last the next one's, as they say themselves.

    ``seeds``: by version, the last one is in the engine; rounds add to it, with the weights of ``others`` in turn. An
    engine may be between two requests just when a round pauses it: then the next round is tried.
    """
    for attempt in range(4):
        last = max(int(v) for v in seeds)
        seeds[str(last + 1)] = others[attempt % 2]
        with Clients(lambda prompt: engine.ask(prompt, LONG), [PROMPTS[0], PROMPTS[0]]) as clients:
            wait_until(lambda: engine.running() or clients.done or clients.failures, "requests to run", every=0.01)
            sync(fleet, last + 1, seeds[str(last + 1)])
        assert not clients.failures
        for asked in clients.done:
            assert (asked.answer.reason, len(asked.answer.tokens)) == ("length", LONG)
            assert untrue(asked.prompt, asked.answer.tokens, asked.answer.spans, seeds) is None
        versions = [[version for version, _, _ in asked.answer.spans] for asked in clients.done]
        if [str(last), str(last + 1)] in versions:
            return
    pytest.fail(f"no request met a round: {versions}")


def test_sglang_takes_both_transports_and_a_request_crosses_the_change(
    fleet: Fleet, models: Path, expected: Expected
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

    seeds = {"2": DISK}
    crossing(fleet, engine, seeds, (101, DISK))
    last = max(int(v) for v in seeds)
    assert engine.label() == str(last)
    assert engine.greedy() == expected[seeds[str(last)]]
    assert engine.checksum() == {101: by_bytes, DISK: from_disk}[seeds[str(last)]]
    digests = fleet.status("rlpipeline", "p")["committed"]["engineDigests"]
    assert [d["digest"] for d in digests] == [engine.checksum()]
    # Only its gate drives it: whoever has not the pod's own key is turned away.
    assert engine.door() == 401
    wait_until(lambda: fleet.status("enginepool", "e").get("fencing") == "Enforced", "the pool to say so")


def test_vllm_takes_both_transports_and_a_request_crosses_the_change(
    fleet: Fleet, models: Path, expected: Expected
) -> None:
    pipeline(fleet, SERIALIZED)
    fleet.trainer(MODEL="llama")
    (engine,) = start(fleet, "VLLM", models, placement=pinned(FREE))
    sync(fleet, -1, 100)
    assert engine.greedy() == expected[100]
    sync(fleet, 1, 101)
    assert engine.greedy() == expected[101]

    pipeline(fleet, BROADCAST)
    status = sync(fleet, 2, 102)
    assert status["plan"]["broadcast"] == 1
    assert engine.greedy() == expected[102]

    # Kept, and recomputed when it went on.
    seeds = {"2": 102}
    crossing(fleet, engine, seeds, (101, 102))
    last = max(int(v) for v in seeds)
    assert engine.label() == str(last)
    assert engine.greedy() == expected[seeds[str(last)]]
    # Its checksums mean nothing on a CPU (packed weights hash as empty), so nothing of them is recorded as proof.
    assert not fleet.status("rlpipeline", "p")["committed"].get("engineDigests")
    assert engine.door() == 401
    wait_until(lambda: fleet.status("enginepool", "e").get("fencing") == "Enforced", "the pool to say so")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sglang_under_load_ends_requests_as_the_mode_says(fleet: Fleet, models: Path, expected: Expected) -> None:
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
            # Of one more answer than there are clients, one was asked for by now.
            enough = len(clients.done) + 4
            wait_until(lambda: len(clients.done) >= enough or clients.failures, "answers")  # noqa: B023
    assert not clients.failures
    for asked in clients.done:
        assert asked.answer.reason == "length"
        assert untrue(asked.prompt, asked.answer.tokens, asked.answer.spans, seeds) is None
    assert {a.answer.spans[0][0] for a in clients.done} >= {"1", "2", "3", "4", "5"}

    # Wait: a request ends with the weights that it began with.
    pipeline(fleet, SERIALIZED, drainSeconds=60, quiesce={"mode": "Wait"})
    waited_for(fleet, engine, seeds)

    # Abort: it ends at once, with what it had. The weights of its tokens are those of one version.
    pipeline(fleet, SERIALIZED, quiesce={"mode": "Abort"})
    aborted = cut_off(fleet, engine, seeds)
    assert all(len(a.answer.tokens) < LONG and len(a.answer.spans) <= 1 for a in aborted)
    last = max(int(v) for v in seeds)
    assert engine.label() == str(last)
    assert engine.greedy() == expected[seeds[str(last)]]
