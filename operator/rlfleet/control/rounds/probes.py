"""The one-token probe of engines that were just resumed (``spec.sync.probeGeneration``), and what follows.

Invariant: an engine that answers wrongly is paused, loses the proof of its weights, and leaves the routers before it is
reported; one that does not answer is reported and left as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.control.peers import Caller
from rlfleet.control.rounds.fleet import Fleet
from rlfleet.control.rounds.results import Ended, ok, why
from rlfleet.plan.probes import Probe, ProbeVerdict, judge_probes

#: Seconds for one token. An engine that goes on with the requests it held may need a while.
PROBE_SECONDS = 20.0


async def probe_generation(
    fleet: Fleet, caller: Caller, names: Iterable[str], *, proven_layouts: Collection[str], deadline: float
) -> ProbeVerdict:
    """Probe resumed engines and take those out that answer wrongly."""
    names = list(names)
    order = wire.ProbeOrder(deadline_seconds=PROBE_SECONDS)
    # Anew, not joined: what a predecessor's probe said was about the engine as it was then.
    results = await fleet.run(caller, "Probe", dict.fromkeys(names, order), deadline=deadline, again=True)
    probes = [_read(name, _layout(fleet, name), results.get(name)) for name in names]
    judged = judge_probes(probes, proven_layouts=proven_layouts)
    if judged.bad:
        shut = wire.PauseOrder(withdraw_proof=True)
        await fleet.run(caller, "Close", dict.fromkeys(judged.bad, wire.CloseOrder()), deadline=deadline, again=True)
        await fleet.run(caller, "Pause", dict.fromkeys(judged.bad, shut), deadline=deadline, again=True)
        await fleet.poll(judged.bad)
    return judged


def _layout(fleet: Fleet, name: str) -> str:
    status = fleet.engines[name].status
    return (status.engine.layout or "unknown") if status is not None else "unknown"


def _read(name: str, layout: str, result: Ended | None) -> Probe:
    if ok(result):
        assert isinstance(result, wire.OperationRecord)
        return Probe(name, layout, token=int(result.result["token"]))
    reason, message = why(result)
    silent = reason in (Reason.DEADLINE_EXCEEDED, Reason.ENGINE_UNREACHABLE, Reason.BUSY)
    return Probe(name, layout, error=None if silent else f"{reason.value}: {message}")
