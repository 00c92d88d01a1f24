"""The work queue, in virtual time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfleet.control.queue import After, Done, Kind, QueueKey, Result, Retry, Terminal, WorkQueue
from rlfleet.kube.errors import Conflict, TooManyRequests
from rlfleet.kube.limiter import Priority

A, B, C = (QueueKey(Kind.POOL, "ns", n) for n in "abc")


class Recorder:
    """A reconciler that notes when each key ran."""

    def __init__(self, answer: Callable[[QueueKey, int], Awaitable[Result]] | None = None) -> None:
        self.runs: dict[QueueKey, list[float]] = defaultdict(list)
        self.order: list[QueueKey] = []
        self.active: set[QueueKey] = set()
        self.peak = 0
        self._answer = answer

    async def __call__(self, key: QueueKey) -> Result:
        assert key not in self.active, "one key ran twice at the same time"
        self.active.add(key)
        self.peak = max(self.peak, len(self.active))
        self.order.append(key)
        self.runs[key].append(asyncio.get_running_loop().time())
        try:
            return await self._answer(key, len(self.runs[key])) if self._answer else Done()
        finally:
            self.active.discard(key)


async def running(queue: WorkQueue, seconds: float) -> None:
    """Let the queue work for a while of virtual time."""
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


pytestmark = pytest.mark.looptime


async def test_many_enqueues_of_a_waiting_key_are_one_run() -> None:
    seen = Recorder()
    queue = WorkQueue(seen)
    for _ in range(10):
        queue.enqueue(A)
    await running(queue, 1)
    assert len(seen.runs[A]) == 1


async def test_enqueue_while_it_runs_makes_one_more_run_after_it() -> None:
    queue: WorkQueue

    async def answer(key: QueueKey, count: int) -> Result:
        if count == 1:
            for _ in range(3):
                queue.enqueue(key)
        await asyncio.sleep(2)
        return Done()

    seen = Recorder(answer)
    queue = WorkQueue(seen)
    start = now()
    queue.enqueue(A)
    await running(queue, 60)
    assert [t - start for t in seen.runs[A]] == [0, 2]


async def test_earliest_due_time_and_best_priority_win() -> None:
    seen = Recorder()
    queue = WorkQueue(seen, concurrency=1)
    start = now()
    queue.enqueue(A, after=30)
    queue.enqueue(A, after=5, priority=Priority.RESYNC)
    queue.enqueue(A, after=60, priority=Priority.ROUND)
    queue.enqueue(B, after=5, priority=Priority.DELETE)
    await running(queue, 100)
    assert [t - start for t in seen.runs[A]] == [5]
    assert seen.order == [A, B], "A inherited the best priority"


async def test_rounds_go_before_scale_ups_before_resyncs() -> None:
    seen = Recorder()
    queue = WorkQueue(seen, concurrency=1)
    queue.enqueue(A, priority=Priority.RESYNC)
    queue.enqueue(B, priority=Priority.SCALE)
    queue.enqueue(C, priority=Priority.ROUND)
    await running(queue, 1)
    assert seen.order == [C, B, A]


async def test_concurrency_is_bounded_and_used() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        await asyncio.sleep(1)
        return Done()

    seen = Recorder(answer)
    queue = WorkQueue(seen, concurrency=3)
    for i in range(10):
        queue.enqueue(QueueKey(Kind.POOL, "ns", str(i)))
    await running(queue, 3.5)
    assert seen.peak == 3
    assert len(seen.order) == 10


async def test_failing_key_waits_longer_each_time_and_is_forgiven() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        if count == 4:
            return Done()
        raise Retry("busy")

    seen = Recorder(answer)
    queue = WorkQueue(seen, backoff_base=1, backoff_max=3, jitter=0)
    queue.enqueue(A)
    await running(queue, 100)
    gaps = [b - a for a, b in zip(seen.runs[A], seen.runs[A][1:], strict=False)]
    assert gaps == [1, 2, 3]
    assert queue.failures == 0
    queue.enqueue(A)
    await running(queue, 10)
    assert seen.runs[A][6] - seen.runs[A][4] == 1 + 2, "after its success the pauses begin anew"


async def test_failing_key_delays_nobody_else() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        if key == A:
            raise RuntimeError("defect")
        return Done()

    seen = Recorder(answer)
    queue = WorkQueue(seen, concurrency=1, backoff_base=10, jitter=0)
    queue.enqueue(A)
    queue.enqueue(B)
    start = now()
    await running(queue, 5)
    assert seen.runs[B] == [start]
    assert queue.failures == 1


@pytest.mark.parametrize(
    ("error", "gap"),
    [
        (Retry("x", after=7), 7),
        (TooManyRequests("slow down", retry_after=9), 9),
        (Conflict("lost"), 0.5),
        (ValueError("defect"), 0.5),
    ],
)
async def test_what_an_error_means(error: Exception, gap: float) -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        if count == 1:
            raise error
        return Done()

    seen = Recorder(answer)
    queue = WorkQueue(seen, backoff_base=0.5, jitter=0)
    queue.enqueue(A)
    await running(queue, 60)
    assert seen.runs[A][1] - seen.runs[A][0] == gap
    assert len(seen.runs[A]) == 2


@pytest.mark.parametrize("when", ["while it runs", "while it waits"])
async def test_nobody_has_a_key_run_before_a_retry_after_is_over(when: str) -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        if key == A and count == 1:
            if when == "while it runs":
                queue.enqueue(A, priority=Priority.ROUND)
            raise TooManyRequests("slow down", retry_after=9)
        return Done()

    seen = Recorder(answer)
    queue = WorkQueue(seen, jitter=0)
    queue.enqueue(A)
    queue.enqueue(B, after=5)
    if when == "while it waits":
        asyncio.get_running_loop().call_later(2, queue.enqueue, A)
    await running(queue, 60)
    assert seen.runs[A] == [seen.runs[A][0], seen.runs[A][0] + 9]
    assert seen.runs[B] == [seen.runs[A][0] + 5]
    queue.enqueue(A)
    await running(queue, 60)
    assert len(seen.runs[A]) == 3, "once it is over it is over"


async def test_terminal_is_not_repeated_until_something_changes() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        raise Terminal("invalid")

    seen = Recorder(answer)
    queue = WorkQueue(seen)
    queue.enqueue(A)
    await running(queue, 1000)
    assert len(seen.runs[A]) == 1
    queue.enqueue(A)
    await running(queue, 1)
    assert len(seen.runs[A]) == 2


async def test_after_looks_again_or_sooner_when_something_changes() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        return After(10)

    seen = Recorder(answer)
    queue = WorkQueue(seen)
    start = now()
    queue.enqueue(A)
    asyncio.get_running_loop().call_later(13, queue.enqueue, A)
    await running(queue, 30)
    assert [t - start for t in seen.runs[A]] == [0, 10, 13, 23]


async def test_drain_lets_running_work_end_and_starts_nothing() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        await asyncio.sleep(3)
        return After(0)

    seen = Recorder(answer)
    queue = WorkQueue(seen, concurrency=1)
    queue.enqueue(A)
    queue.enqueue(B)
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(1)
    assert await queue.drain(10)
    await task
    assert seen.order == [A]
    queue.enqueue(A)
    assert queue.depth() == 0


async def test_drain_cancels_what_does_not_end() -> None:
    cancelled = asyncio.Event()

    async def answer(key: QueueKey, count: int) -> Result:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Done()

    queue = WorkQueue(Recorder(answer))
    queue.enqueue(A)
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(1)
    assert not await queue.drain(2)
    assert cancelled.is_set()
    await task


async def test_depth_and_age_of_what_waits() -> None:
    async def answer(key: QueueKey, count: int) -> Result:
        await asyncio.sleep(100)
        return Done()

    queue = WorkQueue(Recorder(answer), concurrency=1)
    task = asyncio.create_task(queue.run())
    queue.enqueue(A)
    await asyncio.sleep(1)
    queue.enqueue(B)
    queue.enqueue(C, after=50)
    await asyncio.sleep(4)
    assert queue.depth() == 1
    assert queue.oldest_seconds() == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


OPS = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.integers(0, 5), st.sampled_from(list(Priority)), st.integers(0, 3)),
    max_size=30,
)


@settings(max_examples=60)
@given(OPS, st.integers(1, 3), st.integers(0, 2))
def test_no_trigger_is_lost_and_no_key_runs_twice_at_once(
    ops: list[tuple[QueueKey, int, Priority, int]], concurrency: int, work: int
) -> None:
    """Whatever is enqueued when: every trigger is followed by a run that began at or after it was due."""
    due: dict[QueueKey, list[float]] = defaultdict(list)

    async def scenario() -> Recorder:
        async def answer(key: QueueKey, count: int) -> Result:
            await asyncio.sleep(work)
            return Done()

        seen = Recorder(answer)
        queue = WorkQueue(seen, concurrency=concurrency)
        task = asyncio.create_task(queue.run())
        for key, after, priority, pause in ops:
            queue.enqueue(key, after=after, priority=priority)
            due[key].append(now())
            await asyncio.sleep(pause)
        await asyncio.sleep(500)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    loop = looptime.new_event_loop()
    try:
        seen = loop.run_until_complete(scenario())
    finally:
        loop.close()
    for key, times in due.items():
        assert seen.runs[key], "never ran"
        assert seen.runs[key][-1] >= max(times), "the last trigger was followed by no run"
        assert len(seen.runs[key]) <= len(times)
