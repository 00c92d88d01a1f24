"""The TopologyValid condition: broken rules, sources that disagree, and what the transport needs.

Invariant: False is a fault that somebody must mend, Unknown says what is not known yet; neither is ever shown as True,
and every fault is named at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlfleet.api.conditions import Reason
from rlfleet.plan.rounds import Engine
from rlfleet.plan.topology import Identity
from rlfleet.plan.transport import Refusal, choose
from rlfleet.plan.validate import Violation

Verdict = tuple[bool | None, Reason, str]


def topology_valid(
    engines: Iterable[Engine],
    train: Identity,
    *,
    mode: str,
    assert_mixed: bool,
    broken: Sequence[Violation],
    sizes: Mapping[str, int],
    moved: str = "",
) -> Verdict:
    """``broken``: rules that are violated. ``sizes``: GPUs per engine that each pool says. ``moved``: train blocks that
    were allocated anew.
    """
    live = [e for e in engines if not e.gone and not e.dropped and (e.status is not None or e.devices)]
    faults = [(v.reason, v.message) for v in broken]
    disputes = [c for c in (train.conflict, *(e.identity.conflict for e in live)) if c]
    if disputes:
        faults.append((Reason.DEVICE_SOURCES_DISAGREE, f"{'; '.join(disputes)}; correct the one that is wrong"))
    faults += _sizes(live, sizes)
    if faults:
        reason, message = faults[0]
        if len(faults) > 1:
            message = "; ".join(f"{r.value}: {m}" for r, m in faults)
        return False, reason, message
    if mode == "CPUSerialize" and moved:
        return True, Reason.BLOCK_MOVED, moved
    if mode == "CPUSerialize":
        return True, Reason.TOPOLOGY_NOT_NEEDED, "serialized weights need no topology"
    if not live:
        return None, Reason.TOPOLOGY_UNKNOWN, "no engine has reported its devices yet"
    choice = choose(
        mode,
        {e.name: e.devices for e in live},
        train.devices,
        assert_mixed=assert_mixed,
        ranks={e.name: e.status.engine.world_size or 1 for e in live if e.status is not None},
    )
    if isinstance(choice, Refusal):
        unknown = choice.reason is Reason.TOPOLOGY_UNKNOWN
        whys = [w for w in (train.why, *(e.identity.why for e in live)) if w] if unknown else []
        known = "; ".join([choice.message, *whys[:4]])
        return None if unknown else False, choice.reason, known
    if moved:
        return True, Reason.BLOCK_MOVED, moved
    return True, Reason.TOPOLOGY_KNOWN, f"transport {mode} can reach every engine"


def _sizes(live: Iterable[Engine], sizes: Mapping[str, int]) -> list[tuple[Reason, str]]:
    """Engines that stand on more or fewer devices than their pool says."""
    wrong = [
        f"{e.name} has {len(e.devices)} devices, spec.engine.gpusPerEngine of pool {e.pool} is {sizes[e.pool]}"
        for e in sorted(live, key=lambda e: e.name)
        if e.devices and e.pool in sizes and len(e.devices) != sizes[e.pool]
    ]
    return [(Reason.ENGINE_SIZE_MISMATCH, "; ".join(wrong[:8]))] if wrong else []
