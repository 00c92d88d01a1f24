"""Guards that are taken away, one at a time: the function that guards is replaced, and the explorer must notice.

``GUARDS``: a counterexample is demanded. ``PAIRS``: two guards stand behind one another; each alone may go without harm
(``alone`` is checked, too, so that this stays true knowingly), both may not. ``SECOND_LINES`` in the README lists
guards whose removal this model cannot tell from their presence, and why they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from rlfleet.api import fencing, wire
from rlfleet.api.fencing import Admission
from rlfleet.gate import rules, tags
from rlfleet.gate.errors import GateError
from rlfleet.plan import adopt, attempts, claims, elastic, freeze, memory_gate, repair, rounds, verdicts
from rlfleet.plan.verdicts import Agreement, Reopening, Verdict
from tests.model import effects, moving, program
from tests.model.hand import POLL
from tests.model.scopes import ASLEEP, CLOSED, JOINER, SHARED, SLEEPER, STRANGE, TWO_ROUNDS, WEDGED, budget, third
from tests.model.state import OPEN, Column, Scope


class Patch(NamedTuple):
    """One function replaced."""

    owner: Any
    name: str
    by: Any


class Mutation(NamedTuple):
    """A guard that is taken away in a scope small enough to be searched in a few seconds."""

    guard: str
    scope: Scope
    patches: tuple[Patch, ...]
    finds: str  # what the broken invariant says


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_READING = memory_gate.Reading
_IN_THE_WAY = elastic.in_the_way
_ABORT, _NEED = verdicts.abort, repair._need
_STEP, _VERDICT, _AGREE, _REOPENING = claims.barrier_step, verdicts.verdict, verdicts.agree, verdicts.reopening


def _verdict(old: Verdict, new: Verdict) -> Callable[..., Verdict]:
    def judge(*args: Any, **kwargs: Any) -> Verdict:
        found = _VERDICT(*args, **kwargs)
        return new if found is old else found

    return judge


def _same_version(engine: Any, committed: Any) -> bool:
    status = engine.status
    return bool(committed and status and status.holds and status.holds.version == committed.version)


def _resume_by_version(holds: Any, order: Any) -> None:
    if holds is None or holds.version != order.version:
        raise GateError(wire.ErrorReason.NOT_PROVEN, "")


def _reopen_forgetful(judged: Any, engines: Any) -> Reopening:
    return replace(_REOPENING(judged, engines), missing=())


def _reopen_all(judged: Any, engines: Any) -> Reopening:
    return _REOPENING(judged, {n: replace(e, leaving=False, quarantined=False) for n, e in engines.items()})


def _resume_all(plan: Any, engines: Any, *rest: Any, **more: Any) -> Any:
    return _ABORT(plan, {n: replace(e, quarantined=False) for n, e in engines.items()}, *rest, **more)


def _need_of_all(engine: Any, *rest: Any, **more: Any) -> Any:
    return _NEED(replace(engine, quarantined=False), *rest, **more)


def _heard_of(engines: Any) -> tuple[str, ...]:
    return _IN_THE_WAY(e for e in engines if e.status is not None)


def _scope(total: int, faults: dict[str, int], **options: Any) -> Scope:
    return Scope("mutation", budget(total, **faults), **options)


GUARDS = (
    Mutation(
        "the gates' fence",
        _scope(2, {"crash": 1, "delay": 1}),
        (Patch(fencing, "admit", _always(Admission.ACCEPT)),),
        "changed pod",
    ),
    Mutation(
        "the gates' fence, with an offload on its way",
        _scope(2, {"crash": 1, "delay": 1}, elastic=True, later=True, columns=(Column(), SLEEPER)),
        (Patch(fencing, "admit", _always(Admission.ACCEPT)),),
        "changed pod",
    ),
    Mutation(
        "work outside rounds makes room for a Refresh",
        _scope(0, {}, elastic=True, later=True, columns=(Column(), SLEEPER)),
        (Patch(program, "GIVES_WAY", _always(False)),),
        "could run before that",
    ),
    Mutation(
        "a round with nobody in it commits only over a fleet that is asleep",
        _scope(0, {}, elastic=True, columns=(SLEEPER, SLEEPER)),
        (Patch(elastic, "in_the_way", _always(())),),
        "although pods [1, 2] are not asleep",
    ),
    Mutation(
        "a silent gate is not asleep",
        _scope(1, {"silence": 1}, elastic=True, later=True, columns=(SLEEPER, SLEEPER)),
        (Patch(elastic, "in_the_way", _heard_of),),
        "are not asleep",
    ),
    Mutation(
        "the claim is conditional",
        _scope(1, {"rival": 1}, clock=False),
        (Patch(effects, "CONDITIONAL", _always(True)),),
        "claimed twice",
    ),
    Mutation(
        "barrier step 1: the fence rises",
        _scope(1, {"rival": 1}),
        (Patch(claims, "next_fence", lambda held, shown, date: max(held, 1)),),
        "claimed twice",
    ),
    Mutation(
        "the apiserver's clock in a claim",
        _scope(2, {"wipe": 1, "silence": 1}, max_unavailable=1),
        (Patch(claims, "next_fence", lambda held, shown, date: max(held, shown) + 1),),
        "claimed twice",
    ),
    Mutation(
        "barrier step 2: the generation in the round",
        _scope(1, {"rival": 1}),
        (Patch(claims, "barrier_step", lambda b: _STEP(replace(b, written=True))),),
        "deposed operator wrote to round",
    ),
    Mutation(
        "barrier step 3: a fence call to everybody",
        _scope(2, {"crash": 1, "delay": 1}, strict=True),
        (Patch(moving, "FENCING", POLL),),
        "begun to decide",
    ),
    Mutation(
        "everyone is fenced before the commit",
        _scope(2, {"silence": 1, "crash": 1}, max_unavailable=1),
        (Patch(verdicts, "unfenced", _always(())),),
        "committed while",
    ),
    Mutation(
        "who could not be a member counts before the commit",
        _scope(1, {"bad": 1}, columns=third(WEDGED), max_unavailable=1),
        (Patch(verdicts, "still_blocked", _always(())),),
        "not whole",
    ),
    Mutation(
        "one order at a time",
        _scope(1, {"slow": 1}, versions=TWO_ROUNDS, on_failure="Hold", max_unavailable=1),
        (Patch(rules, "nothing_runs", _nothing),),
        "serves bytes",
    ),
    Mutation(
        "no known end after a gate restart",
        _scope(2, {"slow": 1, "gate": 1}, versions=TWO_ROUNDS, on_failure="Hold"),
        (Patch(rules, "after_restart", _always((wire.OperationState.FAILED, True))),),
        "serves bytes",
    ),
    Mutation(
        "the commit comes before the first reopen",
        _scope(1, {"crash": 1}),
        (Patch(program, "COMMIT_FIRST", _always(False)),),
        "serves bytes",
    ),
    Mutation(
        "the reopen precondition: who could serve is closed",
        _scope(1, {"silence": 1}, max_unavailable=1),
        (Patch(verdicts, "could_serve", _always(())),),
        "committed while",
    ),
    Mutation(
        "unknown is not gone",
        _scope(2, {"silence": 1, "crash": 1}),
        (Patch(verdicts, "verdict", _verdict(Verdict.UNKNOWN, Verdict.LOST)),),
        "can not be reached",
    ),
    Mutation(
        "poisoned is not whole",
        _scope(1, {"bad": 1}),
        (Patch(verdicts, "verdict", _verdict(Verdict.POISONED, Verdict.WHOLE)),),
        "not whole",
    ),
    Mutation(
        "verify and publish come before the commit",
        _scope(0, {}),
        (Patch(verdicts, "verdict", _verdict(Verdict.LOADED, Verdict.WHOLE)),),
        "no engine is proven",
    ),
    Mutation(
        "members of one layout must agree",
        _scope(1, {"bad": 1}, max_unavailable=1),
        (Patch(verdicts, "agree", lambda found, **_: Agreement(tuple(e.engine for e in found), {}, {})),),
        "serves bytes",
    ),
    Mutation(
        "what the round has agreed on counts after a takeover",
        _scope(2, {"bad": 1, "crash": 1}, max_unavailable=1),
        (Patch(program.Run, "known", _always(-1)),),
        "serves bytes",
    ),
    Mutation(
        "a lone checksum waits for the others",
        _scope(2, {"bad": 1, "crash": 1}),
        (Patch(verdicts, "agree", lambda found, **k: _AGREE(found, **{**k, "others": None})),),
        "serves bytes",
    ),
    Mutation(
        "a checksum that did not move",
        _scope(1, {"bad": 1}, engines=1, bad_loads=("nothing",)),
        (Patch(rules, "has_changed", _always(True)),),
        "serves bytes",
    ),
    Mutation(
        "whole members that were lost sight of are no success",
        _scope(2, {"silence": 1, "crash": 1}),
        (Patch(verdicts, "reopening", _reopen_forgetful),),
        "can not be reached",
    ),
    Mutation(
        "an evicted member is dropped",
        _scope(2, {"evict": 1, "bad": 1}, engines=2, bad_loads=("failed",)),
        (Patch(verdicts, "verdict", _verdict(Verdict.DROPPED, Verdict.POISONED)),),
        "holds because of pods",
    ),
    Mutation(
        "an evicted member is not reopened, and is not Ok",
        _scope(1, {"evict": 1}, engines=2),
        (Patch(verdicts, "reopening", _reopen_all),),
        "count as Ok",
    ),
    Mutation(
        "who is to go is a member of no round",
        _scope(1, {"evict": 1}, engines=2),
        (Patch(rounds.Engine, "dropped", False),),
        "are members of a round",
    ),
    Mutation(
        "who is in quarantine is a member of no round",
        _scope(1, {"shut": 1}, engines=2),
        (Patch(rounds.Engine, "shut", False),),
        "are members of a round",
    ),
    Mutation(
        "who is in quarantine is not reopened",
        _scope(1, {"shut": 1}, engines=2),
        (Patch(verdicts, "reopening", _reopen_all),),
        "is opened although",
    ),
    Mutation(
        "who is in quarantine is not resumed by an abort",
        _scope(2, {"shut": 1, "cancel": 1}, engines=2),
        (Patch(verdicts, "abort", _resume_all),),
        "is opened although",
    ),
    Mutation(
        "who is in quarantine is not resumed between rounds",
        _scope(1, {"shut": 1}, engines=2, later=True),
        (Patch(repair, "_need", _need_of_all),),
        "is opened although",
    ),
    Mutation(
        "who is in quarantine serves nothing else at the commit",
        _scope(1, {"shut": 1}, engines=2),
        (Patch(verdicts, "could_serve", _always(())),),
        "committed while",
    ),
    Mutation(
        "who is to sleep for the trainer serves nothing else at the commit",
        _scope(2, {"bad": 1, "demand": 1}, columns=third(SHARED), bad_loads=("failed",), versions=TWO_ROUNDS),
        (Patch(verdicts, "could_serve", _always(())),),
        "committed while",
    ),
    Mutation(
        "a wake without a good end is fenced off",
        _scope(3, {"demand": 2, "delay": 1}, later=True, columns=(Column(), ASLEEP), grants=((1, 1),)),
        (Patch(program, "FENCES_WAKES", _always(False)),),
        "is woken while",
    ),
    Mutation(
        "the memory gate waits until a sleeper refuses what was ordered before",
        _scope(4, {"demand": 2, "delay": 1, "lost": 1}, later=True, columns=(Column(), ASLEEP), grants=((1, 1),)),
        (Patch(memory_gate, "is_behind", _always(False)),),
        "is woken while",
    ),
    Mutation(
        "what a gate says is about the process that its kubelet tells of",
        _scope(1, {"restart": 1}),
        (Patch(adopt, "believed", lambda status, process: status),),
        "of an earlier process",
    ),
    Mutation(
        "a gate that is told of another process forgets",
        _scope(1, {"restart": 1}),
        (Patch(rules, "is_another_process", _always(False)),),
        "of an earlier process",
    ),
    Mutation(
        "another label voids the proof",
        _scope(1, {"restart": 1}, engines=2),
        (Patch(rules, "voids_proof", _always(False)),),
        "of an earlier process",
    ),
    Mutation(
        "pods are deleted under their UID",
        _scope(2, {"kill": 1, "bad": 1}),
        (Patch(effects, "PRECONDITION", _always(True)),),
        "deleted pod",
    ),
    Mutation(
        "the start-up promise: quiet routers",
        _scope(2, {"slow": 1, "kill": 1}, slow_steps=(OPEN,), columns=third(CLOSED)),
        (Patch(rules, "quiet_enough", _always(True)),),
        "serves bytes",
    ),
    Mutation(
        "every write to a round is judged",
        _scope(1, {"rival": 1}),
        (Patch(attempts, "decide", _always(attempts.Applied())),),
        "deposed operator wrote to round",
    ),
    Mutation(
        "who is deposed stops",
        _scope(1, {"rival": 1}),
        (Patch(claims, "is_deposed", _always(False)),),
        "deposed operator wrote the pipeline",
    ),
    Mutation(
        "a lost answer to a claim is read back",
        _scope(1, {"lost": 1}),
        (Patch(claims, "claim_landed", _always(True)),),
        "never claimed",
    ),
)

#: (name, scope, first guard, second guard, what both together break)
PAIRS = (
    (
        "the resume rule: the planner asks for nothing else, the gate refuses all else",
        _scope(1, {"cancel": 1}, columns=third(JOINER)),
        (Patch(verdicts, "at_committed", _always(True)),),
        (Patch(rules, "may_resume", _nothing), Patch(rules, "may_open", _nothing)),
        "serves bytes",
    ),
    (
        "digests name bytes, versions do not: in the planner and in the gate",
        _scope(1, {"cancel": 1}, columns=third(STRANGE)),
        (Patch(verdicts, "at_committed", _same_version),),
        (Patch(rules, "may_resume", _resume_by_version),),
        "serves bytes",
    ),
    (
        "weights move only in a paused engine: the round aborts, the gate refuses",
        _scope(1, {"lost": 1}),
        (Patch(moving, "PAUSED_FIRST", _always(False)),),
        (Patch(rules, "may_load", _nothing),),
        "serves bytes",
    ),
    (
        "only a closed engine gives its memory back: the operator asks no other, the gate refuses",
        _scope(0, {}, elastic=True, later=True, columns=(Column(), SLEEPER)),
        (Patch(program, "PAUSED_BEFORE_RELEASE", _always(False)),),
        (Patch(tags, "may_release", _nothing),),
        "serves bytes",
    ),
    (
        "the memory gate: engines are asleep by their gates' word, and the device is free by its driver's",
        _scope(1, {"demand": 1}, later=True, columns=(Column(), SHARED)),
        (Patch(memory_gate, "is_offloaded", _always(True)),),
        (Patch(memory_gate, "Reading", lambda used: _READING(0)),),
        "is granted its device",
    ),
    (
        "silent gates count: at planning, and before the commit",
        _scope(1, {"silence": 1}),
        (Patch(freeze, "unavailable_limit", _always(9)),),
        (Patch(verdicts, "unfenced", _always(())),),
        "committed while",
    ),
)
