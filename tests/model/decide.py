"""The planner's functions over what an operator has seen, with their answers remembered.

Everything here only translates: views of columns into the planner's types, and its answers back into column numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority
from rlfleet.api.v1alpha1.syncround_status import AttemptOp
from rlfleet.api.wire import Transport
from rlfleet.plan import adopt, attempts, demand, holding, memory_gate, quarantine, repair
from rlfleet.plan import elastic as sleeping
from rlfleet.plan import freeze as freezing
from rlfleet.plan import triage as sorting
from rlfleet.plan import verdicts as judging
from rlfleet.plan.rounds import TERMINAL, Committed, Engine, Member, RoundPlan, RoundRef
from rlfleet.plan.topology import Device, Evidence
from rlfleet.plan.transport import Refusal
from tests.model.gate import PIPELINE, cached, digest, gate_status
from tests.model.state import PROCESS, RELEASED, Answer, Column, View

Views = tuple[View, ...]
Members = tuple[int, ...]
#: In place of a member's pod: its gate was silent at planning, or (minus the pod's number) took no orders then.
SILENT, BLOCKED = -2, -10
#: Bytes that may be in use on a shared device.
LIMIT = 1000


def views_of(columns: list[Column], who: int) -> Views:
    """What operator ``who`` knows."""
    return tuple(c.views[who] for c in columns)


def members_of(columns: list[Column], work: int) -> Members:
    """The frozen members of a round: pod numbers."""
    return tuple(c.member[work] for c in columns)


@cached
def engine(number: int, view: View) -> Engine | None:
    """One engine as the planner sees it; None: no such pod."""
    if view.pod < 0:
        return None
    return Engine(
        name=f"e{number}",
        pool="pool",
        pod_uid=f"pod-{view.pod}",
        url="",
        status=believed(view),
        gone=bool(view.gone),
        leaving=bool(view.leaving),
        quarantined=bool(view.shut),
        index=number,
        resting=bool(view.rest),
    )


def believed(view: View) -> wire.GateStatus | None:
    """What the gate said, as far as it is about the engine process that is there (``Fleet._met``)."""
    return adopt.believed(gate_status(view.status), f"c{view.shown}") if view.status else None


@cached
def addressed(view: View) -> int:
    """Whom an order is meant for: pod and incarnation. A gate that did not answer may be the one of before."""
    if not view.status:
        return view.pod
    found = believed(view)
    assert found is not None
    return int(found.incarnation[1:]) if found.incarnation else -1


@cached
def engines(views: Views) -> dict[str, Engine]:
    """All engines that are seen."""
    return {e.name: e for i, v in enumerate(views) if (e := engine(i, v)) is not None}


@cached
def plan(members: Members) -> RoundPlan:
    """The frozen plan of a round."""
    return RoundPlan(
        tuple(
            Member(f"e{i}", f"pod-{m % PROCESS}", f"i{m}", Transport.SERIALIZED) for i, m in enumerate(members) if m > 0
        ),
        1,
        tuple(f"e{i}" for i, m in enumerate(members) if m == SILENT),
        tuple(f"pod-{BLOCKED - m}" for m in members if m <= BLOCKED),
    )


@cached
def committed(value: Answer) -> Committed | None:
    """``status.committed``."""
    return Committed(value[0], digest(value[1]), "", {"L": f"e{value[1]}"}) if value else None


def numbers(names: Any) -> tuple[int, ...]:
    """Column numbers of engine names."""
    return tuple(sorted({int(n[1:]) for n in names}))


@cached
def verdicts(views: Views, members: Members, work: int, version: int, content: int) -> dict[str, judging.Verdict]:
    """Every member's verdict."""
    seen = engines(views)
    return {
        m.engine: judging.verdict(
            m, seen.get(m.engine), operation=f"r{work}", version=version, manifest_digest=digest(content)
        )
        for m in plan(members).members
    }


@cached
def unfenced(views: Views, generation: int) -> tuple[int, ...]:
    """Who has not stored the generation."""
    return numbers(judging.unfenced(engines(views).values(), pipeline=PIPELINE, generation=generation))


@cached
def could_serve(views: Views, members: Members, work: int, version: int, content: int) -> tuple[int, ...]:
    """Who might serve something else than the target."""
    return numbers(judging.could_serve(engines(views), verdicts(views, members, work, version, content)))


@cached
def not_paused(views: Views, names: tuple[int, ...]) -> tuple[int, ...]:
    """Who of them is not proven paused (as ``Closing._shut`` looks)."""
    return tuple(i for i in names if not views[i].status or views[i].status[2] != 1)


@cached
def conclude(
    views: Views, members: Members, work: int, version: int, content: int, open_ones: tuple[int, ...], limit: int
) -> judging.Outcome:
    """Commit, hold, wait or abort."""
    return judging.conclude(
        plan(members),
        verdicts(views, members, work, version, content),
        unfenced=[f"e{i}" for i in open_ones],
        max_unavailable=limit,
        blocked=judging.still_blocked(plan(members), engines(views).values()),
    )


@cached
def agreed(
    evidence: tuple[tuple[int, int], ...], held: Answer, content: int, known: int, others: int
) -> tuple[int, ...]:
    """Members whose checksums agree; evidence is (column, bytes); ``known``: what whole members have been found to
    have (-1: none is); ``others`` may still confirm a lone one."""
    found = [judging.Evidence(f"e{i}", "L", f"e{b}", None) for i, b in evidence]
    answer = judging.agree(
        found,
        committed=committed(held),
        manifest_digest=digest(content),
        verify="IfSupported",
        agreed_on={"L": f"e{known}"} if known >= 0 else {},
        others={"L": others},
    )
    return numbers(answer.agreed)


@cached
def abort(views: Views, members: Members, work: int, held: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The resume rule: who resumes, who is closed."""
    rule = judging.abort(plan(members), engines(views), committed(held), operation=f"r{work}")
    return numbers(rule.resume), numbers(rule.close)


@cached
def reopening(
    views: Views, members: Members, work: int, version: int, content: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """After the commit: who resumes, who is closed, who is missing."""
    doors = judging.reopening(verdicts(views, members, work, version, content), engines(views))
    return numbers(doors.resume), numbers(doors.close), numbers(doors.missing)


@cached
def at_committed(views: Views, held: Answer) -> tuple[int, ...]:
    """Who is proven at the committed weights."""
    return numbers(n for n, e in engines(views).items() if judging.at_committed(e, committed(held)))


@cached
def sender_status(incarnation: int, slots: tuple[tuple[int, int], ...]) -> wire.SenderStatus:
    """What a sender process says of itself."""
    caches = tuple(
        wire.SenderCache(version=v, manifest_digest=digest(b), total_bytes=1, tensors=1, buckets=1) for v, b in slots
    )
    return wire.SenderStatus(
        protocol_version=1,
        capabilities=("Serialized",),
        pod_uid=f"trainer-{incarnation}",
        incarnation=f"s{incarnation}",
        cache=caches[-1] if caches else None,
        slots=caches,
    )


@cached
def freeze(views: Views, incarnation: int, slots: tuple[tuple[int, int], ...], limit: int) -> Members | None:
    """Members of a new round per column (negative: SILENT, or BLOCKED minus its pod); None: refused."""
    seen = engines(views)
    answer = freezing.freeze(
        list(seen.values()),
        mode="CPUSerialize",
        assert_mixed=False,
        backend="gloo",
        train=None,
        sender=sender_status(incarnation, slots),
        total_bytes=1,
        verify="IfSupported",
        max_unavailable=limit,
    )
    if isinstance(answer, Refusal):
        return None
    found = [0] * len(views)
    for m in answer.members:
        found[int(m.engine[1:])] = int(m.incarnation[1:])
    for name in answer.silent:
        found[int(name[1:])] = SILENT
    for i, v in enumerate(views):
        if f"pod-{v.pod}" in answer.blocked:
            found[i] = BLOCKED - v.pod
    return tuple(found)


@cached
def triage(
    rounds: tuple[tuple[int, str, int, int, bool], ...],
    held: Answer,
    sender: Answer,
    slots: tuple[tuple[int, int], ...],
) -> tuple[tuple[tuple[int, str], ...], int]:
    """Rounds are (number, phase, version, sender incarnation, cancelled); ends as (number, outcome), and who runs."""
    answer = sorting.triage(
        [
            RoundRef(
                name=f"r{n}",
                uid=f"r{n}",
                version=version,
                attempt=1,
                sender_incarnation=f"s{made_by}",
                phase=phase,
                created_ms=n,
                cancel=cancelled,
            )
            for n, phase, version, made_by, cancelled in rounds
        ],
        committed=committed(held),
        sender=sender_status(sender[0], slots) if sender else None,
        sender_problem=None,
        now_ms=0,
        pending_ms=600_000,
        joinable=3,
        expected=3,
    )
    return tuple((int(s.round.uid[1:]), s.outcome) for s in answer.settle), (
        int(answer.run.uid[1:]) if answer.run else -1
    )


@cached
def can_load(view: View, member: int, verdict: judging.Verdict, work: int, content: int) -> bool:
    """Healing may load again (``control.rounds.healing.Healing._can_load``)."""
    if verdict not in (judging.Verdict.UNTOUCHED, judging.Verdict.POISONED) or not view.status:
        return False
    _, _, paused, _, _, busy, uncertain, staged, _, log, *_ = view.status
    return bool(staged == (work, content) and not busy and not uncertain and paused == 1 and log[1] >> 2 < 3)


@cached
def elastic(views: Views, behind: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who goes to sleep next, and who wakes; ``behind``: see ``behind``."""
    told = [f"e{i}" for i in behind]
    found = sleeping.plan_elastic(list(engines(views).values()), pipeline=PIPELINE, cache_ready=True, behind=told)
    return numbers(found.shrink), numbers(found.wake)


@cached
def shut(views: Views) -> tuple[int, ...]:
    """Who is closed next because a person keeps it out of service."""
    return numbers(quarantine.plan_quarantine(list(engines(views).values()), pipeline=PIPELINE))


@cached
def needs(views: Views, held: Answer) -> tuple[tuple[int, repair.Act], ...]:
    """What the repair between rounds does, and a takeover of work that no round stands for."""
    found = repair.needs(engines(views).values(), committed(held), pipeline=PIPELINE)
    return tuple((int(n.engine[1:]), n.act) for n in found)


_DEVICE = Device("node", "shared")


def _asked(step: int) -> demand.Demand:
    return demand.Demand("actor", DemandPriority.ACTOR_TRAINING, step, frozenset({_DEVICE}))


def _recorded(grants: tuple[tuple[int, int], ...]) -> tuple[demand.Grant, ...]:
    return tuple(demand.Grant(_asked(step), bool(granted), Reason.GRANTED) for step, granted in grants)


def _placed(views: Views, shared: tuple[int, ...]) -> list[Engine]:
    """Engines with their devices: the shared one, or one of their own."""
    devices = {f"e{i}": _DEVICE if i in shared else Device("node", str(i)) for i in range(len(views))}
    return [replace(e, assigned=Evidence("its pool", frozenset({devices[e.name]}))) for e in engines(views).values()]


@cached
def resting(views: Views, shared: tuple[int, ...], grants: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """Who is to sleep for the demand that is recorded."""
    every = sleeping.Ceiling(replicas=len(views), active=len(views), offloads=True, residual_bytes=LIMIT)
    wish = sleeping.wish(_placed(views, shared), {"pool": every}, held=demand.held_devices(_recorded(grants)))
    return frozenset(numbers(wish.resting))


@cached
def grants(
    views: Views, shared: tuple[int, ...], before: tuple[tuple[int, int], ...], step: int, generation: int
) -> tuple[tuple[int, int], ...]:
    """What becomes of the trainer's demand (``step`` 0: there is none), by what gates said of engines and devices."""
    used = [v.status[10] != RELEASED for i, v in enumerate(views) if i in shared and v.status and not v.gone]
    found = memory_gate.decide_grants(
        [_asked(step)] if step else [],
        _recorded(before),
        engines=_placed(views, shared),
        shared=frozenset({_DEVICE}),
        limits={_DEVICE: LIMIT},
        default_limit=LIMIT,
        memory={_DEVICE: memory_gate.Reading(LIMIT + 1 if any(used) else 0)} if used else {},
        generation=generation,
    )
    return tuple((g.demand.step, int(g.granted)) for g in found)


@cached
def behind(
    views: Views, shared: tuple[int, ...], grants: tuple[tuple[int, int], ...], generation: int
) -> tuple[int, ...]:
    """Sleepers that the trainer waits for until they refuse what was ordered before."""
    found = memory_gate.to_fence(_recorded(grants), _placed(views, shared), generation=generation)
    return numbers(found)


@cached
def in_the_way(views: Views) -> tuple[int, ...]:
    """Who keeps a round that nobody can join from committing."""
    return numbers(sleeping.in_the_way(engines(views).values()))


@cached
def turn(
    after: judging.Next, cancelled: bool, vanished: bool, superseded: bool, can_heal: bool, spent: bool, how: str
) -> holding.Move:
    """The next move of a round in Holding."""
    wishes = holding.Wishes(vanished=vanished, cancelled=cancelled, superseded=superseded)
    return holding.turn(holding.Turn(after, wishes, can_heal=can_heal, spent=spent, on_failure=how))


@cached
def round_write(phase: str, lease: int, wanted: str, generation: int) -> attempts.Decision:
    """Whether a phase may be written to a round, whose last write is known by its phase and generation.

    Each generation has one holder, so the holder's name is made from it.
    """

    def op(to: str) -> AttemptOp:
        return AttemptOp.SETTLE if to in TERMINAL else AttemptOp.ADVANCE

    last = frozenset({attempts.request_id(op(phase), lease, phase)}) if lease else frozenset()
    record = attempts.RoundRecord(phase=phase, holder=f"h{lease}" if lease else "", generation=lease, applied=last)
    asked = attempts.Presented(
        op(wanted),
        attempts.request_id(op(wanted), generation, wanted),
        "r",
        f"h{generation}",
        generation,
        wanted if wanted in TERMINAL else "",
    )
    return attempts.decide(record, asked)
