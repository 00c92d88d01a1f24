"""Many readers, few probes: what they share, what they never share, and where they stop waiting (virtual time)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlfleet.api.wire import GateStatus
from rlfleet.discovery.board import PACE_OF_ALL_SECONDS, PACE_PER_WORKER, PACE_SECONDS, Board, DiscoveryError
from rlfleet.discovery.probing import PROBE_SECONDS, ProbeError, Prober
from rlfleet.plan.discovery import Naming, Scope, Worker
from tests.plan.rounds_kit import DIGEST_A, gate
from tests.plan.test_discovery import worker

pytestmark = pytest.mark.looptime

ALL = Scope()
NAMING = Naming()


def now() -> float:
    return asyncio.get_running_loop().time()


class Fleet:
    """Workers that answer after ``takes`` seconds (by pod name), and what was asked of them."""

    def __init__(self, count: int = 3, *, cap: int = 32, timeout: float = 30.0, list_seconds: float = 0.0) -> None:
        self.workers = [worker(f"e-{i}") for i in range(count)]
        self.takes: dict[str, float] = {}
        self.version = 1
        self.asked: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.peak = 0
        self.lists = 0
        self.listing: Counter[Scope] = Counter()
        self.list_seconds = list_seconds
        self.failure: Callable[[], Awaitable[None]] | None = None
        self.board = Board(self._list, Prober(self._probe, NAMING, cap=cap), NAMING, timeout=timeout)

    async def _list(self, scope: Scope) -> list[Worker]:
        self.lists += 1
        self.listing[scope] += 1
        assert self.listing[scope] == 1, "one list of a scope at a time"
        try:
            await asyncio.sleep(self.list_seconds)
            if self.failure is not None:
                await self.failure()
            return self.workers
        finally:
            self.listing[scope] -= 1

    async def _probe(self, w: Worker, seconds: float) -> GateStatus:
        version = self.version  # as it was when the probe began
        self.asked[w.pod] += 1
        self.under_way[w.pod] += 1
        assert self.under_way[w.pod] == 1, "one probe of a worker at a time"
        self.peak = max(self.peak, self.under_way.total())
        try:
            await asyncio.sleep(self.takes.get(w.pod, 0.001))
            if self.takes.get(w.pod) == 0:
                raise ProbeError(f"{w.pod}: no connection")
            return gate(holds=(version, DIGEST_A))
        finally:
            self.under_way[w.pod] -= 1

    async def read(self, scope: Scope = ALL) -> dict[str, dict[str, Any]]:
        """Entries by pod."""
        body = json.loads((await self.board.read(scope)).body(is_strict=False))
        assert body["protocol_version"] == 1
        assert body["namespace"] == "dynamo"
        return {w["rlfleet"]["pod"]: w for w in body["workers"]}


async def test_readers_that_come_together_share_one_look() -> None:
    fleet = Fleet(50)
    found = await asyncio.gather(*(fleet.read() for _ in range(100)))
    assert all(f.keys() == {w.pod for w in fleet.workers} for f in found)
    assert set(fleet.asked.values()) == {1}
    assert fleet.lists == 1


async def test_a_reader_gets_what_was_asked_after_it_came() -> None:
    fleet = Fleet(list_seconds=1)
    first = asyncio.create_task(fleet.read())
    await asyncio.sleep(0.5)  # its list is being read
    late = asyncio.create_task(fleet.read())
    fleet.takes = {"e-0": 2.0}
    await asyncio.sleep(0.6)  # its probes are under way, one of them slow
    assert fleet.under_way["e-0"] == 1
    fleet.version = 2
    later = asyncio.create_task(fleet.read())
    old, new, newest = await asyncio.gather(first, late, later)
    assert {w["rlfleet"]["version"] for w in old.values()} == {1}
    assert {w["rlfleet"]["version"] for w in (*new.values(), *newest.values())} == {2}
    # One list each: the second reader came while the first was being read, the third while the second was.
    assert fleet.lists == 3
    # Of the slow worker the second and the third had to wait for the same probe.
    assert fleet.asked["e-0"] == 2


async def test_that_a_worker_does_not_answer_is_told_to_those_who_came_meanwhile() -> None:
    fleet = Fleet()
    fleet.takes = {"e-0": 1000.0}
    first = asyncio.create_task(fleet.read())
    await asyncio.sleep(2)
    second = asyncio.create_task(fleet.read())
    await asyncio.sleep(2)
    fleet.takes["e-0"] = 1.0
    assert "error" in (await first)["e-0"]
    assert now() == pytest.approx(PROBE_SECONDS, abs=0.1)
    assert "error" in (await second)["e-0"]
    assert now() == pytest.approx(PROBE_SECONDS, abs=0.1)
    assert "error" not in (await fleet.read())["e-0"]
    assert fleet.asked["e-0"] == 2


async def test_no_more_than_the_cap_are_asked_at_once_for_all_readers_and_scopes() -> None:
    fleet = Fleet(40, cap=4)
    fleet.takes = {w.pod: 1.0 for w in fleet.workers}
    board = fleet.board
    scopes = [ALL, Scope("team"), Scope("team", "p")]
    await asyncio.gather(*(board.read(s) for s in scopes for _ in range(5)))
    assert fleet.peak == 4
    # The four whose probes had begun when the second scope was listed are asked twice, for that and the third together.
    assert sorted(fleet.asked.values()) == [1] * 36 + [2] * 4
    assert now() == pytest.approx(11.0)


async def test_one_deadline_covers_the_wait_for_a_turn_and_the_probe() -> None:
    fleet = Fleet(10, cap=1, timeout=7)
    fleet.takes = {w.pod: 2.0 for w in fleet.workers}
    found = await fleet.read()
    assert now() == pytest.approx(7.0)
    assert len(found) == 10
    errors = [w["error"] for w in found.values() if "error" in w]
    assert errors == ["worker discovery timed out after 7s"] * 7
    await asyncio.sleep(60)  # nobody waits for the others: they are not asked any more
    assert fleet.asked.total() == 4


async def test_the_list_counts_against_the_same_deadline() -> None:
    fleet = Fleet(1, timeout=3, list_seconds=2.0)
    fleet.takes = {"e-0": 2.0}
    assert (await fleet.read())["e-0"]["error"] == "worker discovery timed out after 3s"
    assert now() == pytest.approx(3.0)


async def test_slow_workers_hold_up_each_other_and_are_asked_no_longer_than_needed() -> None:
    fleet = Fleet(100, cap=4)
    slow = {w.pod for w in fleet.workers[:20]}
    fleet.takes = dict.fromkeys(slow, 1000.0)
    found = await fleet.read()
    assert {pod for pod, w in found.items() if "error" in w} == slow
    began = now()
    # From now on it is known who does not answer, and at least half of the turns are for the others.
    reader = asyncio.create_task(fleet.read())
    fleet.asked.clear()
    await asyncio.sleep(1.0)
    assert {w.pod for w in fleet.workers} - slow <= fleet.asked.keys()
    await reader
    assert now() - began <= 20 / 2 * PROBE_SECONDS + 1
    # Who answers again is as good as any other.
    fleet.takes = {}
    assert not any("error" in w for w in (await fleet.read()).values())


async def test_frozen_workers_take_no_turn_from_who_comes_after_them() -> None:
    fleet = Fleet(40, cap=8)
    fleet.takes = {w.pod: 1000.0 for w in fleet.workers}
    assert all("error" in w for w in (await fleet.read()).values())
    frozen = asyncio.create_task(fleet.read())
    await asyncio.sleep(1)
    assert fleet.under_way.total() == 4
    fleet.workers = [worker("well")]
    began = now()
    assert "error" not in (await fleet.read(Scope("team")))["well"]
    assert now() - began < 1
    frozen.cancel()


async def test_workers_that_did_not_answer_are_asked_again_even_with_a_single_turn() -> None:
    fleet = Fleet(3, cap=1)
    fleet.takes = {"e-1": 0}
    assert "no connection" in (await fleet.read())["e-1"]["error"]
    del fleet.takes["e-1"]
    assert "error" not in (await fleet.read())["e-1"]


async def test_workers_that_did_not_answer_have_turns_even_while_others_are_asked_all_the_time() -> None:
    fleet = Fleet(1, cap=2)
    fleet.takes = {"e-0": 0}
    assert "error" in (await fleet.read())["e-0"]
    (ill,) = fleet.workers
    fleet.workers = [worker(f"f-{i}") for i in range(100)]
    fleet.takes = {w.pod: 0.5 for w in fleet.workers}
    busy = asyncio.create_task(fleet.read())
    await asyncio.sleep(1)
    fleet.workers = [ill]
    began = now()
    assert "error" not in (await fleet.read(Scope("team")))["e-0"]
    assert now() - began < 1
    await busy


async def test_nothing_known_is_a_failure_and_never_an_empty_list() -> None:
    fleet = Fleet()

    async def away() -> None:
        raise DiscoveryError("the apiserver is away")

    fleet.failure = away
    for answer in await asyncio.gather(fleet.board.read(ALL), fleet.board.read(ALL)):
        with pytest.raises(DiscoveryError, match="the apiserver is away"):
            answer.body(is_strict=False)

    async def defect() -> None:
        raise KeyError("spec")

    fleet.failure = defect
    with pytest.raises(DiscoveryError, match="see its log"):
        (await fleet.board.read(ALL)).body(is_strict=True)

    async def forever() -> None:
        await asyncio.sleep(1e9)

    fleet.failure = forever
    with pytest.raises(DiscoveryError, match="within 30 s"):
        (await fleet.board.read(ALL)).body(is_strict=False)
    fleet.failure = None
    assert len(await fleet.read()) == 3


async def test_an_empty_list_is_known_to_be_empty() -> None:
    fleet = Fleet(0)
    assert await fleet.read() == {}


async def test_what_nobody_waits_for_is_given_up() -> None:
    fleet = Fleet(10, cap=2)
    fleet.takes = {w.pod: 3.0 for w in fleet.workers}
    impatient = [asyncio.create_task(fleet.read()) for _ in range(3)]
    await asyncio.sleep(1)
    for task in impatient[:2]:
        task.cancel()
    await asyncio.sleep(3)
    assert fleet.asked.total() == 4  # one is still there
    impatient[2].cancel()
    await asyncio.sleep(60)
    assert fleet.asked.total() == 4
    assert fleet.under_way.total() == 0
    assert len(await fleet.read()) == 10


async def test_readers_in_a_loop_are_paced() -> None:
    fleet = Fleet(1)
    for _ in range(10):
        await fleet.read()
    assert 8 * PACE_SECONDS <= now() <= 11 * PACE_SECONDS
    assert fleet.lists == 10
    began = now()
    fleet.workers = [worker(f"e-{i}") for i in range(1000)]
    await asyncio.gather(*(fleet.read() for _ in range(3)))
    await fleet.read()
    assert now() - began >= 1000 * PACE_PER_WORKER


async def test_a_defect_in_asking_is_an_error_of_that_worker() -> None:
    fleet = Fleet(2)
    asked = fleet._probe

    async def broken(w: Worker, seconds: float) -> GateStatus:
        if w.pod == "e-0":
            raise ValueError("a defect")
        return await asked(w, seconds)

    fleet.board = Board(fleet._list, Prober(broken, NAMING, cap=2), NAMING, timeout=30)
    found = await fleet.read()
    assert "see its log" in found["e-0"]["error"]
    assert "error" not in found["e-1"]


async def test_nothing_is_kept_of_readers_and_workers_that_are_gone() -> None:
    fleet = Fleet(5, timeout=4, cap=2)
    fleet.takes = {"e-0": 100.0, "e-1": 0}
    for _ in range(3):
        await asyncio.gather(fleet.read(Scope("team", "p")), fleet.read())
    await asyncio.sleep(60)
    board, prober = fleet.board, fleet.board._prober
    for held in (board._forming, board._reading, board._tasks, prober._next, prober._running, prober._tasks):
        assert not held
    assert len(board._not_before) <= 2
    assert set(prober._suspects) <= {w.uid for w in fleet.workers}


async def test_scopes_take_turns_and_share_one_pace() -> None:
    """Many scopes, each with readers in a loop: the apiserver hears of them as often as of a few, and nobody waits
    longer than it takes to serve everybody else once."""
    fleet = Fleet(1)
    scopes = [Scope(f"n{i}") for i in range(40)]
    answered: Counter[Scope] = Counter()

    async def reader(scope: Scope) -> None:
        while True:
            await fleet.read(scope)
            answered[scope] += 1

    tasks = [asyncio.create_task(reader(s)) for s in scopes]
    began = now()
    await asyncio.sleep(40 * PACE_OF_ALL_SECONDS * 5)
    assert fleet.lists <= (now() - began) / PACE_OF_ALL_SECONDS + 1
    assert min(answered.values()) >= 4
    assert max(answered.values()) - min(answered.values()) <= 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.board.close()
