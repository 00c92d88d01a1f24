"""Progress of rollouts: what the counters come to, and when that is worth a write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.progress import StreamProgress, aggregate

COUNTS = st.integers(min_value=0, max_value=10_000)
STREAMS = st.lists(
    st.builds(
        StreamProgress,
        key=st.sampled_from(["a", "b", "c", "d"]),
        batch=st.integers(min_value=0, max_value=3),
        target=COUNTS,
        collected=st.integers(min_value=-5, max_value=20_000),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda s: s.key,
)


def one(collected: int, target: int, batch: int = 0, key: str = "a") -> StreamProgress:
    return StreamProgress(key, batch, target, collected)


def test_a_stream_counts_up_to_its_target_and_no_further() -> None:
    found = aggregate([one(300, 100), one(50, 100, key="b")])
    assert found is not None
    assert (found.target, found.collected, found.completed, found.percent) == (200, 350, 150, 74)


def test_a_stream_without_target_is_not_done_before_it_began() -> None:
    found = aggregate([one(0, 0)])
    assert found is not None
    assert (found.target, found.percent) == (1, 0)


def test_two_percent_is_a_step_and_less_is_none() -> None:
    at = [aggregate([one(n, 1000)]) for n in (0, 19, 20, 39, 40, 1000)]
    assert [p.bucket for p in at if p is not None] == [0, 0, 1, 1, 2, 50]
    assert at[1] is not None
    assert at[2] is not None
    assert at[1].same_as(at[0])
    assert not at[2].same_as(at[1])


def test_another_batch_another_stream_and_a_stream_less_are_news() -> None:
    here = aggregate([one(5, 10), one(5, 10, key="b")])
    assert here is not None
    assert not here.same_as(None)
    for other in ([one(5, 10, batch=1), one(5, 10, key="b")], [one(5, 10)], [one(5, 10), one(5, 10, key="c")]):
        assert not here.same_as(aggregate(other))
    assert here.same_as(aggregate([one(5, 10, key="b"), one(5, 10)])), "the order of streams means nothing"


def test_no_stream_no_progress() -> None:
    assert aggregate([]) is None


@given(STREAMS)
def test_the_figure_stays_within_its_limits(streams: list[StreamProgress]) -> None:
    found = aggregate(streams)
    assert found is not None
    assert 0 <= found.completed <= found.target
    assert found.collected >= found.completed
    assert 0 <= found.percent <= 100
    assert found.percent % 2 == 0
    assert (found.percent == 100) == (found.completed == found.target)


@given(STREAMS, st.integers(min_value=1, max_value=1000))
def test_more_collected_never_means_less_progress(streams: list[StreamProgress], more: int) -> None:
    before = aggregate(streams)
    first, *rest = streams
    after = aggregate([StreamProgress(first.key, first.batch, first.target, max(0, first.collected) + more), *rest])
    assert before is not None
    assert after is not None
    assert after.bucket >= before.bucket
