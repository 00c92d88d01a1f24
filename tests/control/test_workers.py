"""What becomes of engines by what their Dynamo frontend says of them, and by what it does not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1 import EngineState
from rlfleet.control.context import ControlSettings
from rlfleet.control.pool import PoolReconciler
from rlfleet.control.workers import WorkerMemory, _strange, frontend_url, stand
from rlfleet.discovery.client import Frontends, Unknown
from rlfleet.plan.catchup import needs as needs_catch_up
from rlfleet.plan.drops import to_close as round_closes
from rlfleet.plan.dynamo import REQUIRED, Listing, Worker
from rlfleet.plan.lifecycle import derive
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.pool_observed import Observed, Problem
from rlfleet.plan.pool_status import build_status
from rlfleet.plan.quarantine import plan_quarantine, why_shut
from rlfleet.plan.repair import Act, needs
from rlfleet.plan.rounds import Committed, Engine, RoundPlan
from rlfleet.plan.transport import Refusal
from rlfleet.plan.verdicts import Verdict, abort, could_serve, reopening
from tests.control.test_routers import engine_pod, pod, view
from tests.plan import rounds_kit
from tests.plan.pool_kit import fact
from tests.plan.pool_kit import gate as pool_gate
from tests.plan.rounds_kit import DIGEST_A, DIGEST_B, cache, engine, gate, sender

COMMITTED = Committed(1, DIGEST_A, "s1", {"L": "E"})
POOL: dict[str, Any] = {
    "metadata": {"name": "pool", "namespace": "ns", "uid": "u"},
    "spec": {
        "pipeline": "p",
        "engine": {"type": "Dynamo", "port": 8081},
        "source": {"dynamo": {"url": "http://10.0.0.9:8001/", "selector": {"matchLabels": {"a": "b"}}}},
    },
}
AWAY = Unknown("http://10.0.0.9:8001/v1/rl/workers: no connection")


def worker(number: str = "7", **edits: Any) -> Worker:
    fields: dict[str, Any] = {"system_url": f"http://10.0.0.{number}:8081", "routes": REQUIRED}
    return Worker("dynamo", "backend", "rl", number, **{**fields, **edits})


def told(*workers: Worker) -> Listing:
    return Listing("dynamo", workers, 1)


def one(name: str = "a", number: str | None = "7", *, state: str = "Ready", **how: Any) -> Engine:
    """An engine that serves version 1 in process ``number``."""
    report = wire.EngineReport(
        state=wire.EngineState(state), paused=how.pop("paused", False), world_size=1, layout="L", instance=number
    )
    status = gate(**{"holds": (1, DIGEST_A), "pipeline": "p", "engine": report, **how})
    return engine(name, status, owned=False, address=f"10.0.0.{number or 7}")


def seen(memory: WorkerMemory, answer: Listing | Unknown, *engines: Engine) -> list[Engine]:
    found = stand(memory, {"pool": POOL}, {"pool": answer}, engines)
    return [found[e.name] for e in engines]


def plan(engines: list[Engine], maximum: int | str = "10%") -> RoundPlan | Refusal:
    return rounds_kit.frozen(engines, sender=sender(cache(2, DIGEST_B)), max_unavailable=maximum)


def test_whoever_is_listed_as_it_should_be_is_an_engine_like_any_other() -> None:
    (a,) = seen(WorkerMemory(), told(worker()), one())
    assert (a.kept_out, a.undiscovered, a.dropped) == ("", "", False)
    frozen = plan([a])
    assert isinstance(frozen, RoundPlan)
    assert [m.engine for m in frozen.members] == ["a"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (told(), "WorkerNotListed"),
        (told(worker("8")), "WorkerNotListed"),
        (told(worker(error="Unavailable")), "WorkerNotListed"),
        (told(worker(system_url="http://10.0.0.99:8081")), "WorkerNotJoined"),
        (told(worker(routes=REQUIRED - {"flush_cache"})), "RoutesMissing"),
    ],
)
def test_one_that_is_not_is_closed_and_in_no_round_but_neither_gone_nor_in_the_way(
    answer: Listing, reason: str
) -> None:
    a, b = seen(WorkerMemory(), Listing("dynamo", (*answer.workers, worker("9")), 1), one(), one("b", "9"))
    assert a.kept_out.startswith(f"{reason}: ")
    frozen = plan([a, b])
    assert isinstance(frozen, RoundPlan)
    assert [m.engine for m in frozen.members] == ["b"]
    # Between rounds it is closed by a claim of its own, in a round by that, and before the commit in any case.
    assert plan_quarantine([a, b], pipeline="p") == ("a",)
    assert why_shut([a])[0] is Reason.parse(reason)
    assert round_closes(a)
    assert could_serve({"a": a, "b": b}, {"b": Verdict.WHOLE}) == ("a",)
    # Nobody opens it: not repair, not a round that ends, not a CatchUp.
    (shut,) = seen(WorkerMemory(), answer, one(paused=True))
    assert needs([shut], COMMITTED, pipeline="p") == ()
    assert not needs_catch_up(shut, COMMITTED, "p")
    assert reopening({"a": Verdict.WHOLE}, {"a": shut}).resume == ()
    assert abort(RoundPlan((), 1), {"a": shut}, COMMITTED, operation="r").resume == ()


def test_an_unknown_list_keeps_the_last_verdict_on_a_process_and_lets_nobody_in() -> None:
    memory = WorkerMemory()
    good, bad = seen(memory, told(worker()), one(), one("b", "8"))
    assert (good.kept_out, bool(bad.kept_out)) == ("", True)
    good, bad = seen(memory, AWAY, one(), one("b", "8"))
    assert (good.kept_out, bool(bad.kept_out)) == ("", True)
    assert plan_quarantine([good], pipeline="p") == (), "an engine that serves goes on"
    # A round must not take it along, for it may have been taken out since, and must say why.
    refusal = plan([good])
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, "no connection" in refusal.message) == (Reason.DISCOVERY_UNREACHABLE, True)
    within = plan([good, engine("sglang", gate())], maximum=1)
    assert isinstance(within, RoundPlan)
    assert ([m.engine for m in within.members], within.blocked) == (["sglang"], (good.pod_uid,))
    assert could_serve({"a": good}, {}) == ("a",), "closed before that round commits"


def test_while_nothing_is_known_nobody_is_opened() -> None:
    (paused,) = seen(WorkerMemory(), AWAY, one(paused=True))
    assert needs([paused], COMMITTED, pipeline="p") == ()
    assert abort(RoundPlan((), 1), {"a": paused}, COMMITTED, operation="r").resume == ()
    (back,) = seen(WorkerMemory(), told(worker()), one(paused=True))
    assert [n.act for n in needs([back], COMMITTED, pipeline="p")] == [Act.RESUME]
    (behind,) = seen(WorkerMemory(), AWAY, one(paused=True, holds=(0, DIGEST_B)))
    assert not needs_catch_up(behind, COMMITTED, "p")


def test_another_process_in_the_pod_has_no_verdict_of_the_one_before() -> None:
    memory = WorkerMemory()
    assert seen(memory, told(), one())[0].kept_out
    assert not seen(memory, AWAY, one(number="8"))[0].kept_out
    memory.keep_only({"uid-a"}.__contains__)
    assert seen(memory, AWAY, one())[0].kept_out
    memory.keep_only({"uid-b"}.__contains__)
    assert not seen(memory, AWAY, one())[0].kept_out


async def test_what_no_pool_names_any_more_is_forgotten_and_nothing_else() -> None:
    """After a takeover pipelines ask frontends of pools that this operator has not looked at yet."""
    mine = view(pod("a"))
    ctx = SimpleNamespace(
        pods=mine, workers=WorkerMemory(), frontends=Frontends(), kube=None, guard=None, settings=ControlSettings()
    )
    pools = PoolReconciler(ctx)  # type: ignore[arg-type]
    other, own = "http://127.0.0.1:1", "http://127.0.0.1:2"
    named = {**POOL, "spec": {**POOL["spec"], "source": {"dynamo": {"url": own}}}}
    first, second = ("ns", "first"), ("ns", "second")
    ctx.workers.verdicts = {"a": ("7", None), "gone": ("8", None)}
    try:
        for url in (other, own):
            await ctx.frontends.look(url, patience=0)
        asked = dict(ctx.frontends._frontends)
        await pools._note_frontend(first, named)
        await pools._note_frontend(second, named)
        await pools._note_frontend(first, None)
        assert ctx.frontends._frontends == asked, "another pool names it still, and the other one is somebody else's"
        assert ctx.workers.verdicts == {"a": ("7", None)}
        # The last one goes.
        await pools._note_frontend(second, {**POOL, "spec": {**POOL["spec"], "source": {"template": {}}}})
        assert list(ctx.frontends._frontends) == [other]
        assert pools._frontends == {}
    finally:
        await ctx.frontends.close()
        await pools.close()


def test_one_that_answers_and_does_not_say_who_it_is_is_unknown_and_one_that_starts_is_waited_for() -> None:
    (nameless,) = seen(WorkerMemory(), told(worker()), one(number=None))
    assert (nameless.kept_out, bool(nameless.undiscovered)) == ("", True)
    (starting,) = seen(WorkerMemory(), told(worker()), one(number=None, state="Starting"))
    assert (starting.kept_out, starting.undiscovered) == ("", "")


def test_a_listed_worker_in_no_pod_with_a_gate_is_told() -> None:
    pods = view(engine_pod("a", "10.0.0.7"), pod("gateless", "10.0.0.8"))
    ctx: Any = SimpleNamespace(pods=pods)
    assert list(_strange(ctx, POOL, told(worker()))) == []
    (problem,) = _strange(ctx, POOL, told(worker(), worker("8"), worker("9")))
    assert problem.reason is Reason.WORKER_NOT_JOINED
    assert "worker dynamo/backend/8 at http://10.0.0.8:8081 and 1 more" in problem.message


def test_the_frontend_of_a_service() -> None:
    assert frontend_url(POOL) == "http://10.0.0.9:8001"
    source = {"dynamo": {"service": {"name": "f", "port": 8002}, "selector": {"matchLabels": {"a": "b"}}}}
    assert frontend_url({**POOL, "spec": {**POOL["spec"], "source": source}}) == "http://f.ns.svc:8002"


def test_status_says_who_is_kept_out_why_and_what_is_unknown() -> None:
    why = (Reason.WORKER_NOT_LISTED, "instance 7 runs, and the frontend does not list it")
    committed = Committed(12, "sha256:" + "a" * 64)
    out, fresh = fact(0, withheld=why), fact(1, withheld=why)

    def row(pod: Any, status: wire.GateStatus) -> Row:
        derived = derive(pod, status, committed=committed, routers=frozenset())
        return Row(pod, derived, status, True)

    rows = (row(out, pool_gate()), row(fresh, pool_gate(holds=None)))
    assert [r.derived.state for r in rows] == [EngineState.QUARANTINED, EngineState.LOADING]
    made: dict[str, Any] = {"generation": 1, "replicas": 2, "pool": "a", "routers": frozenset(), "template_hash": None}

    def said(*rows: Row, **more: Any) -> dict[str, tuple[str, str, str]]:
        observed = Observed(rows=rows, committed=committed, source="dynamo", selector="a=b", **(made | more))
        found = build_status(observed, {}, now="2026-01-01T00:00:00Z")
        return {c["type"]: (c["status"], c["reason"], c["message"]) for c in found["conditions"]}

    assert said(*rows)["Degraded"][:2] == ("True", "WorkerNotListed")
    assert "a-0" in said(*rows)["Degraded"][2]
    unknown = Problem(Reason.DISCOVERY_UNREACHABLE, AWAY.message)
    well = row(fact(0), pool_gate())
    found = said(well, replicas=1, unknown=unknown, problems=(unknown,))
    assert (found["Ready"][:2], found["Degraded"][:2]) == (
        ("Unknown", "DiscoveryUnreachable"),
        ("True", "DiscoveryUnreachable"),
    )
    assert said(well, replicas=1)["Ready"][:2] == ("True", "AllEnginesActive")
    assert "spec.source.dynamo.selector" in said(replicas=0)["Ready"][2]
