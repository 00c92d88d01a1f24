"""What an engine tells, how it is paused and resumed, and what its requests go through."""

from __future__ import annotations

import asyncio

from e2e.engines.fixtures import DISK
from e2e.engines.reference import TOLERANCE, lags
from rlfleet.api.wire import PauseMode
from rlfleet.engine import Capability
from tests.contract.bench import OTHER, SECONDS, SHORT, Bench, Missed, Observed, case, outcome, still

# ---------------------------------------------------------------------------------------------- observation


@case()
async def facts_are_told(bench: Bench) -> Observed:
    """Version, layout, and what it can do; asking twice tells the same."""
    facts = await bench.engine.facts(SECONDS)
    assert facts == await bench.engine.facts(SECONDS)
    assert len(facts.layout) == 16
    assert {Capability.SERIALIZED, Capability.LABEL} <= facts.capabilities
    return {
        "version": facts.version,
        "worldSize": facts.world_size,
        "refused": facts.refused,
        # Whether memory can be given back depends on how it was started; a case of its own covers it.
        "capabilities": sorted(facts.capabilities - {Capability.OFFLOAD}),
    }


@case()
async def a_view_tells_requests(bench: Bench) -> Observed:
    """Idle, with one running request, and idle again."""
    before = await bench.view()
    assert (before.reachable, before.admitting, before.label) == (True, True, "0")
    assert (before.running, before.waiting) == (0, 0)
    assert before.model
    async with bench.request() as task:
        running = (await bench.view()).running
        still(task)
        assert running == 1
    while (await bench.view()).running != 0:
        await asyncio.sleep(0.01)
    return None


@case()
async def keys_are_told_apart(bench: Bench) -> Observed:
    """Control paths take the admin key only, users' paths the user key only."""
    found = {}
    for name, keys in {
        "no key": (None, None),
        "user key on control paths": ("user-key", "user-key"),
        "admin key on users' paths": ("admin-key", "admin-key"),
    }.items():
        other = bench.subject.adapter(api_key=keys[0], admin_key=keys[1])
        try:
            found[name] = {
                "pause": await outcome(other.pause(bench.engine.default_pause, drain_seconds=0, seconds=2)),
                "label": await outcome(other.write_label("9", 5)),
                "probe": await outcome(other.probe(SECONDS)),
            }
        finally:
            await other.close()
    view = await bench.view()
    await bench.engine.resume()
    assert await bench.engine.guarded(SECONDS) is True
    return {**found, "label after all": view.label}


# ---------------------------------------------------------------------------------------------- admission


def _pause_case(mode: PauseMode) -> None:
    async def run(bench: Bench) -> Observed:
        """A running request under this mode, and one that comes during the pause; a refused mode touches nothing."""
        async with bench.request() as task:
            if Capability.of_pause(mode) not in bench.capabilities:
                assert await outcome(bench.pause(mode)) == "refused"
                assert (await bench.view()).admitting is True
                still(task)
                assert (await task).reason == "length"
                return "refused"
            await bench.pause(mode, drain=60.0)
            view = await bench.view()
            assert (view.admitting, view.running, view.label) == (False, 0, "0")
            late = asyncio.create_task(bench.subject.ask(SHORT, 4))
            assert await bench.engine.idle(SECONDS, memory_here=True) is True
            await bench.engine.flush(SECONDS)
            if mode in (PauseMode.KEEP, PauseMode.RETRACT):
                still(task)
            else:
                await asyncio.wait({task}, timeout=SECONDS)
            ended = task.done()
            assert not late.done()
            await bench.engine.resume()
            answer = await task
            if mode is PauseMode.ABORT and answer.reason == "length":
                raise Missed
            assert len((await late).tokens) == 4
            assert max(lags(DISK, SHORT, answer.tokens)) <= TOLERANCE
            return {
                "ended in the pause": ended,
                "reason": answer.reason,
                "all tokens": len(answer.tokens) == bench.subject.long,
                "waiting in the pause": view.waiting,
            }

    run.__name__ = f"pause_{mode.value.lower()}"
    case(Capability.of_pause(mode))(run)


for _mode in PauseMode:
    _pause_case(_mode)


@case(Capability.PAUSE_WAIT)
async def a_wait_ends_at_its_deadline(bench: Bench) -> Observed:
    """What still runs then is held as by default, and goes on afterwards."""
    async with bench.request() as task:
        await bench.pause(PauseMode.WAIT, drain=0.1)
        still(task)
        view = await bench.view()
        assert (view.admitting, view.running) == (False, 0)
        await bench.engine.resume()
        answer = await task
        assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    return None


@case()
async def pause_and_resume_may_be_asked_twice(bench: Bench) -> Observed:
    """Neither is an error the second time."""
    for _ in range(2):
        await bench.pause()
        assert (await bench.view()).admitting is False
    for _ in range(2):
        await bench.engine.resume()
        assert (await bench.view()).admitting is True
    return None


@case()
async def a_kept_request_goes_on_with_the_new_weights(bench: Bench) -> Observed:
    """Its cache is recomputed: every token is the choice of the weights that served it."""
    async with bench.request() as task:
        await bench.pause()
        still(task)
        await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
        await bench.engine.flush(SECONDS)
        assert await bench.engine.write_label("1", SECONDS) == "1"
        await bench.engine.resume()
        answer = await task
    assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    old, new = ([lag <= TOLERANCE for lag in lags(seed, SHORT, answer.tokens)] for seed in (DISK, OTHER))
    change = old.index(False)
    assert change > 0
    assert all(new[change:])
    return None


@case()
async def a_flush_under_load_never_lies(bench: Bench) -> Observed:
    """It says no, or it drops what runs as well; the request ends as it would have either way."""
    async with bench.request() as task:
        # An engine that can will do it at once; one that can not would do it when the request has ended.
        can = Capability.PAUSE_KEEP in bench.capabilities
        ended = await outcome(bench.engine.flush(SECONDS if can else 0.2))
        still(task)
        answer = await task
    assert (answer.reason, len(answer.tokens)) == ("length", bench.subject.long)
    assert max(lags(DISK, SHORT, answer.tokens)) <= TOLERANCE
    # Whether the last of its refusals comes before or after its deadline says nothing.
    return "done" if ended == "done" else "not done"
