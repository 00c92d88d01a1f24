"""Device memory that is given back and taken again, and what proves an engine idle."""

from __future__ import annotations

from e2e.engines.fixtures import DISK
from e2e.engines.reference import TOLERANCE, lags
from rlfleet.api.wire import PauseMode
from rlfleet.engine import Capability
from rlfleet.engine.common import PROBE_PROMPT
from rlfleet.gate.tags import RELEASE_ORDER
from tests.contract.bench import OTHER, SECONDS, Bench, Observed, case

# ---------------------------------------------------------------------------------------------- device memory


@case(Capability.OFFLOAD)
async def memory_is_given_back_and_taken_again(bench: Bench) -> Observed:
    """Tag by tag; the engine stays paused all the time, and what its weights held is gone."""
    await bench.pause(PauseMode.ABORT)
    await bench.engine.flush(SECONDS)
    tags = [tag for tag in RELEASE_ORDER if tag in (await bench.engine.facts(SECONDS)).memory_tags]
    for tag in tags:
        await bench.engine.release_memory(tag, seconds=SECONDS)
    assert await bench.engine.idle(SECONDS, memory_here=False) is True
    for tag in reversed(tags):
        await bench.engine.resume_memory(tag, seconds=SECONDS)
        assert (await bench.view()).admitting is False
    await bench.engine.load_directory(bench.directory(OTHER), seconds=SECONDS)
    await bench.loaded(OTHER)
    return {"tags": [tag.value for tag in tags]}


# ---------------------------------------------------------------------------------------------- proofs


@case()
async def a_probe_is_one_greedy_token(bench: Bench) -> Observed:
    """The token that these weights choose; what it says of their version."""
    token = await bench.engine.probe(SECONDS)
    assert max(lags(DISK, PROBE_PROMPT, [token.token])) <= TOLERANCE
    return {"label": token.label}


@case()
async def a_paused_engine_is_proven_idle(bench: Bench) -> Observed:
    """With its memory, and as if some were given back."""
    await bench.pause()
    found = [await bench.engine.idle(SECONDS, memory_here=here) for here in (True, False)]
    await bench.engine.resume()
    assert found == [True, True]
    return None
