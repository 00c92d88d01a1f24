"""Planning without a sender: what a round must name, which engines can read it, and where it lies for them."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.checkpoint import INCARNATION
from rlfleet.api.conditions import Reason
from rlfleet.api.wire import Transport
from rlfleet.plan.catchup import Transporting, choose_members, plan_catch_up
from rlfleet.plan.checkpoint import MODE, SHELF, below, checkpoint_path, mode_of
from rlfleet.plan.pipeline import sender_ready
from rlfleet.plan.pods import CHECKPOINT_DIR_ENV, build_pod
from rlfleet.plan.rounds import Committed, RoundPlan, has_weights, held
from rlfleet.plan.template import InvalidPool, template_hash
from rlfleet.plan.transport import Refusal
from rlfleet.plan.triage import triage
from tests.plan import rounds_kit
from tests.plan.pool_kit import pool as make_pool
from tests.plan.rounds_kit import DIGEST_A, cache, engine, gate, ref, sender

PATH = "/checkpoints/run/7"


def frozen(*mounts: str | None, **gates: Any) -> RoundPlan | Refusal:
    """Freeze a round of engines with these mounts."""
    engines = [engine(f"e{i}", gate(**gates), checkpoint_mount=mount) for i, mount in enumerate(mounts)]
    return rounds_kit.frozen(engines, mode=MODE, backend="nccl", sender=SHELF, total_bytes=0, path=PATH)


def test_every_engine_that_mounts_the_volume_reads_the_checkpoint() -> None:
    plan = frozen("/checkpoints", "/checkpoints/")
    assert isinstance(plan, RoundPlan)
    assert [m.transport for m in plan.members] == [Transport.CHECKPOINT] * 2
    assert all(m.rank_offset is None for m in plan.members)


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        (None, "engine e1 has no volume of checkpoints: set spec.gate.checkpointVolume of EnginePool pool"),
        ("/data", "engine e1 mounts its checkpoints at /data, which does not hold /checkpoints/run/7"),
    ],
)
def test_an_engine_that_does_not_is_refused_before_anything_is_touched(mount: str | None, says: str) -> None:
    plan = frozen("/checkpoints", mount)
    assert isinstance(plan, Refusal)
    assert plan.reason is Reason.CHECKPOINT_NOT_MOUNTED
    assert says in plan.message


def test_an_engine_that_loads_no_directories_is_refused() -> None:
    plan = frozen("/checkpoints", capabilities=("Broadcast",))
    assert isinstance(plan, Refusal)
    assert plan.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize(
    ("mount", "path", "relative"),
    [
        ("/c", "/c/run/1", "run/1"),
        ("/c/", "/c/1", "1"),
        ("/", "/c/1", "c/1"),
        ("/c", "/c", None),
        ("/c", "/cc/1", None),
        ("/c", "/c/../d/1", None),
        (None, "/c/1", None),
    ],
)
def test_only_what_lies_below_the_volume_has_a_path(mount: str | None, path: str, relative: str | None) -> None:
    assert below(mount, path) == relative


def decide(*rounds: Any, committed: Committed | None = None) -> Any:
    """Triage with the stand-in for a sender."""
    return triage(
        rounds,
        committed=committed,
        sender=SHELF,
        sender_problem=None,
        now_ms=1000,
        pending_ms=60_000,
        joinable=2,
        expected=2,
    )


def test_a_round_names_its_bytes_and_is_then_taken_at_its_word() -> None:
    named = ref("named", version=7, manifest_digest=DIGEST_A, sender_incarnation=INCARNATION)
    nameless = ref("nameless", version=8, sender_incarnation=INCARNATION)
    decision = decide(named, nameless)
    assert decision.run == named
    [end] = decision.settle
    assert (end.round, end.outcome, end.reason) == (nameless, "Failed", Reason.DIGEST_REQUIRED)
    assert held(SHELF, 7, None) is None


def test_what_is_committed_is_known_by_its_digest() -> None:
    again = ref("again", version=7, manifest_digest=DIGEST_A, sender_incarnation=INCARNATION)
    [end] = decide(again, committed=Committed(7, DIGEST_A, INCARNATION)).settle
    assert (end.outcome, end.reason) == ("Succeeded", Reason.ALREADY_COMMITTED)


def test_an_engine_that_is_behind_catches_up_from_the_committed_checkpoint() -> None:
    committed = Committed(7, DIGEST_A, INCARNATION, {"L": "E"})
    how = Transporting(MODE, "nccl", None, "IfSupported", path_template="/checkpoints/run/{version}")
    late = engine("late", gate(paused=True), checkpoint_mount="/checkpoints")
    plan = plan_catch_up(
        [late],
        pipeline="p",
        committed=committed,
        sender=SHELF,
        sender_problem=None,
        counts=(),
        failures=(),
        how=how,
        on_failure="Replace",
        now_ms=0,
    )
    assert plan.open == (late,)
    lost = engine("lost", gate(paused=True), checkpoint_mount="/other")
    chosen, refused = choose_members([late, lost], committed=committed, how=how, sender=SHELF, total_bytes=0)
    assert [m.engine for m in chosen.members] == ["late"]
    assert refused["lost"].reason is Reason.CHECKPOINT_NOT_MOUNTED


def test_the_pipeline_says_that_there_is_no_sender() -> None:
    ready, reason, _ = sender_ready(SHELF, None)
    assert (ready, reason) == (True, Reason.CHECKPOINT_SOURCE)


def test_sleeping_engines_may_wake_without_a_sender() -> None:
    assert has_weights(SHELF)
    assert not has_weights(None)
    assert not has_weights(sender())
    assert has_weights(sender(cache()))


def test_mode_and_path_follow_the_spec() -> None:
    spec: dict[str, Any] = {"weights": {"sender": {}}, "transport": {"mode": "Auto"}}
    assert (mode_of(spec), checkpoint_path(spec, 7)) == ("Auto", None)
    spec["weights"] = {"checkpoint": {"pathTemplate": "/c/{version}/x"}}
    assert (mode_of(spec), checkpoint_path(spec, -1)) == (MODE, "/c/-1/x")


def test_the_gate_reads_where_the_engine_does_and_never_writes() -> None:
    pool = make_pool()
    before = template_hash(pool)
    container = pool["spec"]["source"]["template"]["spec"]["containers"][0]
    mount = {"name": "ckpt", "mountPath": "/checkpoints", "subPath": "team"}
    container["volumeMounts"] = [mount]
    plain = template_hash(pool)
    pool["spec"]["gate"]["checkpointVolume"] = "ckpt"
    assert len({before, plain, template_hash(pool)}) == 3
    pod = build_pod(pool, 0, "e-0", public_keys={})
    gate_container = pod["spec"]["initContainers"][-1]
    assert {**mount, "readOnly": True} in gate_container["volumeMounts"]
    assert {"name": CHECKPOINT_DIR_ENV, "value": "/checkpoints"} in gate_container["env"]
    container["volumeMounts"] = []
    with pytest.raises(InvalidPool, match=r"spec\.gate\.checkpointVolume: container 'engine' must mount volume 'ckpt'"):
        build_pod(pool, 0, "e-0", public_keys={})
