"""What a TrainerDemand means: which devices, which of it counts, what of progress is written."""

from __future__ import annotations

from typing import Any

from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.common import MAX_EXACT
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority, PipelineProgress
from rlfleet.plan.demand import (
    Demand,
    Grant,
    demands_of,
    grants_of,
    is_of,
    progress_of,
    progress_row,
    trainer_of,
)
from rlfleet.plan.memory_gate import decide_grants
from rlfleet.plan.topology import Device

TRAIN = frozenset({Device("n0", "GPU-0"), Device("n0", "GPU-1")})


def demand(*requests: dict[str, Any], streams: tuple[dict[str, Any], ...] = (), owner: str = "uid-1") -> dict[str, Any]:
    return {
        "metadata": {"name": "demo", "ownerReferences": [{"kind": "RLPipeline", "uid": owner}]},
        "spec": {
            "trainer": {"podUID": "pod-1", "podName": "trainer-0"},
            "requests": list(requests),
            "streams": list(streams),
        },
    }


def request(step: int = 3, **more: Any) -> dict[str, Any]:
    return {"cluster": "actor-train", "priority": "ActorTraining", "step": step, "id": "r1", **more}


def test_a_request_is_for_the_whole_train_pool_unless_it_names_devices() -> None:
    (whole,) = demands_of(demand(request()), train=TRAIN, before=())
    assert whole == Demand("actor-train", DemandPriority.ACTOR_TRAINING, 3, TRAIN, "r1")
    (part,) = demands_of(demand(request(devices=[{"node": "n1", "devices": ["GPU-7"]}])), train=TRAIN, before=())
    assert part.devices == {Device("n1", "GPU-7")}


def test_a_demand_without_a_known_train_pool_is_refused_and_says_what_to_do() -> None:
    demands = demands_of(demand(request()), train=None, before=())
    (grant,) = decide_grants(demands, (), engines=(), shared=frozenset(), limits={}, default_limit=2**30, memory={})
    assert (grant.granted, grant.reason) == (False, Reason.TOPOLOGY_UNKNOWN)
    assert "spec.trainer.gpus" in grant.message


def test_what_was_granted_keeps_its_devices_when_the_train_pool_is_not_known_any_more() -> None:
    first = demands_of(demand(request()), train=TRAIN, before=())
    before = [Grant(d, True, Reason.GRANTED) for d in first]
    recorded = grants_of({"grants": [g.row() for g in before]})
    for train in (None, frozenset({Device("n0", "GPU-0")})):
        (again,) = demands_of(demand(request()), train=train, before=recorded)
        assert again.devices == TRAIN
        (grant,) = decide_grants(
            [again], recorded, engines=(), shared=frozenset(), limits={}, default_limit=2**30, memory={}
        )
        assert grant.granted


def test_another_request_for_the_same_step_is_not_answered_by_the_old_grant() -> None:
    before = [Grant(d, True, Reason.GRANTED) for d in demands_of(demand(request()), train=TRAIN, before=())]
    (anew,) = demands_of(demand(request(id="r2")), train=TRAIN, before=before)
    (grant,) = decide_grants([anew], before, engines=(), shared=TRAIN, limits={}, default_limit=2**30, memory={})
    assert (grant.demand.id, grant.granted, grant.reason) == ("r2", False, Reason.MEMORY_UNREADABLE)
    assert grant.row()["id"] == "r2"


def test_whose_demand_it_is() -> None:
    assert is_of(demand(), "uid-1")
    assert not is_of(demand(owner="an earlier one"), "uid-1")
    assert (trainer_of(demand()).pod_name, trainer_of(demand()).pod_uid) == ("trainer-0", "pod-1")


def test_progress_is_written_for_two_percent_or_another_batch_and_not_in_between() -> None:
    def at(collected: int, batch: int = 1) -> dict[str, Any]:
        return demand(streams=({"key": "a", "batch": batch, "target": 100, "collected": collected},))

    first = progress_row(progress_of(at(10)), None)
    assert first is not None
    assert (first["percent"], first["collected"]) == (10, 10)
    assert progress_row(progress_of(at(11)), first) == first
    later = progress_row(progress_of(at(12)), first)
    assert later is not None
    assert later["collected"] == 12
    anew = progress_row(progress_of(at(12, batch=2)), later)
    assert anew is not None
    assert anew["batches"] != later["batches"]
    assert progress_row(progress_of(demand()), anew) is None, "no stream, no progress"


def test_counters_that_the_schema_takes_one_by_one_add_up_to_a_row_that_it_takes() -> None:
    most = {"batch": 1, "target": MAX_EXACT, "collected": MAX_EXACT}
    found = progress_row(progress_of(demand(streams=({"key": "a", **most}, {"key": "b", **most}))), None)
    assert found is not None
    assert PipelineProgress.model_validate(found).percent == 100
