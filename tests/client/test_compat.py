"""The coordinator's public surface: names, keywords, answers and errors. The test plays the operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.api import labels
from rlfleet.client import Client
from rlfleet.client.compat import MilesCoordinator, ProgressReport
from rlfleet.client.compat import environment as env
from tests.client.fleet import INCARNATION, KEY, SECONDS, Fleet
from tests.client.test_demand import answer, demand, until, wants

HANDLES = {"cache_owner_actor": SimpleNamespace(incarnation=INCARNATION), "rollout_manager": object()}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.TRANSPORT, env.ASSERT_MIXED, env.RESIDUAL, env.DEFER, env.CONTROL_PLANE):
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------------------ environment


def test_transport_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, mode in {"": None, "  ": None, " Auto ": "auto", "BROADCAST": "broadcast"}.items():
        monkeypatch.setenv(env.TRANSPORT, text)
        assert env.transport_mode() == mode
    monkeypatch.setenv(env.TRANSPORT, "nccl")
    with pytest.raises(RuntimeError, match="auto, broadcast, cpu_serialize"):
        env.transport_mode()


@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf", ""])
def test_residual_memory_is_a_positive_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(env.RESIDUAL, text)
    with pytest.raises(RuntimeError, match=env.RESIDUAL):
        env.residual_gib()


def test_residual_memory_that_is_not_set_is_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.residual_gib() is None
    monkeypatch.setenv(env.RESIDUAL, "7.5")
    assert env.residual_gib() == 7.5


@pytest.mark.parametrize(
    ("mode", "train", "infer", "per_engine", "why"),
    [
        ("broadcast", [0], [0, 1], 1, "needs transport mode auto"),
        ("auto", [0], None, 1, "needs infer_gpu_ids"),
        ("auto", [8], [0, 1, 2, 3], 2, "would use broadcast"),
        ("auto", [0, 2], [0, 1, 2, 3], 2, "would use cpu_serialize"),
    ],
)
def test_mixed_is_asserted_on_the_whole_fleet(
    monkeypatch: pytest.MonkeyPatch, mode: str, train: list[int], infer: list[int] | None, per_engine: int, why: str
) -> None:
    env.check_mixed(mode, train, infer, per_engine)  # asked by nobody
    monkeypatch.setenv(env.ASSERT_MIXED, "true")
    env.check_mixed(mode, train, infer, per_engine)  # only 1 asks
    monkeypatch.setenv(env.ASSERT_MIXED, "1")
    with pytest.raises(RuntimeError, match=why):
        env.check_mixed(mode, train, infer, per_engine)
    env.check_mixed("auto", [0], [3, 2, 1, 0], 2)


@pytest.mark.parametrize("name", ["", "a:b", 7, None])
def test_ids_that_cannot_be(name: Any) -> None:
    with pytest.raises(ValueError, match="pipeline_id"):
        MilesCoordinator(pipeline_id=name, pipeline_config={})


# ------------------------------------------------------------------------------------------------ at an apiserver


@pytest.fixture
def client(cluster: LocalCluster, fleet: Fleet) -> Iterator[Client]:
    fleet.pipeline_status(publicKeys=[{"kid": "k1", "key": KEY}])
    with Client(fleet.namespace, "demo", cluster.kubeconfig, pod_uid="pod-1") as made:
        yield made


@pytest.fixture
def coordinator(client: Client) -> MilesCoordinator:
    return MilesCoordinator(pipeline_id="demo", pipeline_config=SimpleNamespace(num_gpus_per_node=4), client=client)


def pool(fleet: Fleet, spec: dict[str, Any] | None = None, **states: str) -> None:
    """One pool whose engines e0, e1... are in these states, each on the device of its number."""
    meta = {"name": "pool", "namespace": fleet.namespace}
    fleet.cluster.apply(
        {
            "apiVersion": labels.API_VERSION,
            "kind": "EnginePool",
            "metadata": meta,
            "spec": {
                "pipeline": "demo",
                "replicas": len(states),
                **(spec or {}),
                "engine": {"type": "SGLang"},
                "source": {"template": {"spec": {"containers": [{"name": "engine", "image": "x"}]}}},
                "gate": {"image": "x"},
            },
        }
    )
    rows = [
        {"name": f"pool-{i}", "index": i, "node": "n0", "gpus": [f"GPU-{i}"], "state": state}
        for i, state in ((int(k[1:]), v) for k, v in states.items())
    ]
    fleet.cluster.kubectl(
        "patch", "enginepool", "pool", f"--namespace={fleet.namespace}", "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {"engines": rows}}),
    )  # fmt: skip


@pytest.mark.cluster
def test_registration_refuses_in_this_order_and_stores_nothing(
    fleet: Fleet, coordinator: MilesCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.bootstrap_active_engines({0})
    for missing in HANDLES:
        with pytest.raises(ValueError, match=missing):
            coordinator.register_model_update_resources(**{**HANDLES, missing: None}, rollout_num_gpus_per_engine=0)
    with pytest.raises(ValueError, match="rollout_num_gpus_per_engine"):
        coordinator.register_model_update_resources(**HANDLES, rollout_num_gpus_per_engine=0)
    monkeypatch.setenv(env.TRANSPORT, "broadcast")
    with pytest.raises(RuntimeError, match=r"spec\.transport\.mode of the RLPipeline is CPUSerialize"):
        coordinator.register_model_update_resources(**HANDLES)
    monkeypatch.setenv(env.TRANSPORT, "cpu_serialize")
    monkeypatch.setenv(env.ASSERT_MIXED, "1")
    with pytest.raises(RuntimeError, match="needs transport mode auto"):
        coordinator.register_model_update_resources(**HANDLES, infer_gpu_ids=[0, 1])
    monkeypatch.delenv(env.ASSERT_MIXED)
    with pytest.raises(RuntimeError, match="before register_model_update_resources"):
        coordinator.sync_base_weights_to_active(1)
    with pytest.raises(RuntimeError, match=r"rollout_num_gpus_per_engine=5 does not fit.*num_gpus_per_node=4"):
        coordinator.register_model_update_resources(**HANDLES, rollout_num_gpus_per_engine=5)
    pool(fleet, e0="Active")
    with pytest.raises(RuntimeError, match=r"spec\.engine\.gpusPerEngine of EnginePool pool is 1"):
        coordinator.register_model_update_resources(**HANDLES, rollout_num_gpus_per_engine=2)
    with pytest.raises(RuntimeError, match="before register_model_update_resources"):
        coordinator.sync_base_weights_to_active(1)
    coordinator.register_model_update_resources(**HANDLES)
    assert wants(fleet) == [], "no engine was asked for anything"


@pytest.mark.cluster
def test_a_fleet_that_cannot_be_reached_is_refused_at_registration(
    fleet: Fleet, cluster: LocalCluster, client: Client
) -> None:
    """As the coordinator refuses a manager that lacks its calls: before any engine is touched."""
    with Client(fleet.namespace, "no-such", cluster.kubeconfig) as stranger:
        missing = MilesCoordinator(pipeline_id="no-such", pipeline_config={}, client=stranger)
        with pytest.raises(RuntimeError, match="rlfleet cannot carry out syncs for pipeline 'no-such'"):
            missing.register_model_update_resources(**HANDLES)
        with pytest.raises(RuntimeError, match="before register_model_update_resources"):
            missing.resize_infer([0], [])


@pytest.mark.cluster
def test_a_trainer_that_speaks_to_the_coordinator_trains_unchanged(fleet: Fleet, client: Client) -> None:
    """The sequence of a rlix MILES job, with the coordinator's own keywords."""
    pool(fleet, e0="Active", e1="Active")
    fleet.sender_seen(version=-1)
    trained: list[int] = []

    def job() -> None:
        coordinator = MilesCoordinator(
            pipeline_id="demo", pipeline_config={"verify_model_after_sync": True}, client=client
        )
        assert coordinator.create_pipeline_actor(pipeline_config={"lr": 1}).config["system_envs"]["PIPELINE_ID"]
        assert coordinator.publish_cache_ready_step(-1) == -1
        coordinator.register_model_update_resources(
            **HANDLES, train_gpu_ids=[0], infer_gpu_ids=[0, 1], rollout_num_gpus_per_engine=1
        )
        coordinator.bootstrap_active_engines({0, 1})
        assert coordinator.get_active_engines() == frozenset({0, 1})
        assert coordinator.sync_base_weights_to_active(-1) == -1
        assert coordinator.resize_infer([0], []).success is True
        assert coordinator.get_active_engines() == frozenset({1})
        trained.append(0)
        assert coordinator.sync_base_weights_to_active(0) == 0
        assert coordinator.resize_infer([], [0]).success is True
        assert coordinator.get_active_engines() == frozenset({0, 1})

    with ThreadPoolExecutor() as threads:
        running = threads.submit(job)
        (base,) = fleet.wait_rounds(1)
        assert (base["spec"]["version"], base["spec"]["senderIncarnation"]) == (-1, INCARNATION)
        fleet.succeed(base["metadata"]["name"])
        answer(fleet, granted=True)
        (request,) = wants(fleet)
        assert request["devices"] == [{"node": "n0", "devices": ["GPU-0"]}]
        assert len(fleet.rounds()) == 1, "it goes on when its pool shows the engine asleep"
        pool(fleet, e0="Offloaded", e1="Active")
        first = fleet.wait_rounds(2)[1]
        assert first["spec"]["version"] == 0
        fleet.succeed(first["metadata"]["name"])
        until(lambda: wants(fleet) == [], "the device to be given back")
        pool(fleet, e0="Loading", e1="Active")
        pool(fleet, e0="Active", e1="Active")
        running.result(SECONDS)
    assert trained == [0]


@pytest.mark.cluster
def test_resize_tells_what_stands_in_the_way(
    fleet: Fleet, coordinator: MilesCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool(fleet, e0="Active", e1="Offloaded", e2="Loading")
    with pytest.raises(RuntimeError, match="shrink before register"):
        coordinator.resize_infer([0], [])
    with pytest.raises(RuntimeError, match="expand before register"):
        coordinator.resize_infer([], [0])
    coordinator.register_model_update_resources(**HANDLES)
    with pytest.raises(RuntimeError, match="before cache-ready"):
        coordinator.resize_infer([], [1])
    fleet.sender_seen(version=-1)
    coordinator.publish_cache_ready_step(-1)
    with pytest.raises(RuntimeError, match=r"heterogeneous states \(0: Active, 1: Offloaded\)"):
        coordinator.resize_infer([], [0, 1])
    with pytest.raises(RuntimeError, match=r"heterogeneous states \(2: Loading\)"):
        coordinator.resize_infer([], [2])
    with pytest.raises(RuntimeError, match=r"engines \[7\] have no process"):
        coordinator.resize_infer([], [7])
    assert coordinator.resize_infer([], [0]).success, "an active engine is only counted"
    assert coordinator.get_active_engines() == frozenset({0})
    monkeypatch.setenv(env.DEFER, "1")
    with pytest.raises(RuntimeError, match=env.DEFER):
        coordinator.resize_infer([], [0])
    monkeypatch.setenv(env.RESIDUAL, "lots")
    with pytest.raises(RuntimeError, match=env.RESIDUAL):
        coordinator.resize_infer([0], [])
    monkeypatch.setenv(env.RESIDUAL, "5")
    with pytest.raises(RuntimeError, match=r"spec\.residualMemoryGiB of EnginePool pool is 13"):
        coordinator.resize_infer([0], [])
    assert coordinator.resize_infer([], []).success
    assert wants(fleet) == []


@pytest.mark.cluster
def test_ranks_are_those_of_one_pool_that_lists_all_of_them(fleet: Fleet, coordinator: MilesCoordinator) -> None:
    coordinator.register_model_update_resources(**HANDLES)
    with pytest.raises(RuntimeError, match="only EnginePool; it has: none"):
        coordinator.resize_infer([0], [])
    fleet.sender_seen(version=-1)
    coordinator.publish_cache_ready_step(-1)
    pool(fleet, {"active": 1}, e0="Active", e1="Offloaded")
    with pytest.raises(RuntimeError, match=r"beside 1 others: spec\.active of EnginePool pool is 1"):
        coordinator.resize_infer([], [1])
    pool(fleet, {"replicas": 65}, e0="Active")
    with pytest.raises(RuntimeError, match="65 engines: ranks of a pool of more than 64"):
        coordinator.resize_infer([0], [])
    assert wants(fleet) == []


def row(request: dict[str, Any], *, granted: bool, reason: str) -> dict[str, Any]:
    known = {k: request[k] for k in ("cluster", "priority", "step", "id", "devices")}
    return known | {"granted": granted, "reason": reason, "message": "as it is"}


@pytest.mark.cluster
def test_a_shrink_that_fails_for_one_engine_asks_for_none(fleet: Fleet, coordinator: MilesCoordinator) -> None:
    pool(fleet, e0="Active", e1="Active")
    coordinator.register_model_update_resources(**HANDLES)
    coordinator.bootstrap_active_engines({0, 1})
    with ThreadPoolExecutor() as threads:
        running = threads.submit(coordinator.resize_infer, [0, 1], [])
        asked = until(lambda: len(found := wants(fleet)) == 2 and found, "both requests")
        grants = [row(r, granted=True, reason="Granted") for r in asked]
        grants[1] = row(asked[1], granted=False, reason="Unsupported")
        fleet.pipeline_status(grants=grants)
        with pytest.raises(RuntimeError, match=r"shrink of engine . failed: .*Unsupported: as it is"):
            running.result(SECONDS)
    assert wants(fleet) == []
    assert coordinator.get_active_engines() == {0, 1}


@pytest.mark.cluster
def test_a_deferred_start_puts_everybody_to_sleep_until_the_first_expand_brings_what_is_ready(
    fleet: Fleet, coordinator: MilesCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.DEFER, "1")
    pool(fleet, {"replicas": 2}, e0="Loading")
    fleet.sender_seen(version=-1)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(coordinator.bootstrap_active_engines, set())
        # It waits for all of them to be there: a demand would keep those from being made.
        pool(fleet, e0="Loading", e1="Loading")
        asked = until(lambda: len(found := wants(fleet)) == 2 and found, "both requests")
        fleet.pipeline_status(grants=[row(r, granted=True, reason="Granted") for r in asked])
        pool(fleet, e0="Offloaded", e1="Offloaded")
        running.result(SECONDS)
        assert coordinator.get_active_engines() == frozenset()
        coordinator.register_model_update_resources(**HANDLES)
        coordinator.publish_cache_ready_step(-1)
        assert coordinator.sync_base_weights_to_active(0) == 0
        assert fleet.rounds() == [], "only what is ready has advanced"
        fleet.sender_seen(version=0)
        expanding = threads.submit(coordinator.resize_infer, [], [0, 1])
        (made,) = fleet.wait_rounds()
        assert made["spec"]["version"] == 0
        assert len(wants(fleet)) == 2, "nobody wakes before it is committed"
        fleet.succeed(made["metadata"]["name"])
        until(lambda: wants(fleet) == [], "the devices to be given back")
        pool(fleet, e0="Active", e1="Active")
        assert expanding.result(SECONDS).success
    assert coordinator.get_active_engines() == {0, 1}


@pytest.mark.cluster
def test_the_active_set_is_set_once_and_an_empty_one_syncs_nobody(fleet: Fleet, coordinator: MilesCoordinator) -> None:
    coordinator.bootstrap_active_engines(set())
    with pytest.raises(RuntimeError, match="once"):
        coordinator.bootstrap_active_engines(set())
    assert coordinator.get_active_engines() == frozenset()
    assert coordinator.sync_base_weights_to_active(4) == 4
    assert fleet.rounds() == []
    with pytest.raises(NotImplementedError, match="not LoRA adapters"):
        coordinator.sync_lora_weights(loras_to_sync=[])
    assert coordinator.remove_resource_manager_node_pg() is False


@pytest.mark.cluster
def test_progress_is_forwarded_and_never_raises(fleet: Fleet, coordinator: MilesCoordinator) -> None:
    def report(**metrics: Any) -> None:
        coordinator.report_progress_from_scheduler(ProgressReport("demo", 100, metrics=metrics))

    report()  # opens a batch
    report(collected=50)
    (stream,) = demand(fleet)["spec"]["streams"]
    assert stream == {"key": "actor_train:__fft__", "batch": 1, "target": 100, "collected": 50}
    report(collected=1, new_batch=True, mode="eval", adapter_id="lora-1")
    report(collected=2, new_batch=True)
    assert {s["key"]: s["batch"] for s in demand(fleet)["spec"]["streams"]} == {
        "actor_train:__fft__": 2,
        "eval:lora-1": 1,
    }
    report(collected="no number")
    coordinator.report_progress_from_scheduler(object())
    coordinator.clear_progress_stream(mode="eval", adapter_id="lora-1")
    coordinator.clear_progress_stream(mode="eval", adapter_id="unknown")
    assert [s["key"] for s in demand(fleet)["spec"]["streams"]] == ["actor_train:__fft__"]


@pytest.mark.cluster
def test_the_actor_is_one_and_its_configuration_is_a_copy(
    coordinator: MilesCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.RESIDUAL, "9")
    config = {"system_envs": {"PIPELINE_ID": "theirs", "OTHER": "kept"}}
    actor = coordinator.create_pipeline_actor(pipeline_config=config)
    assert actor.config["system_envs"] == {
        "PIPELINE_ID": "demo",
        "OTHER": "kept",
        "ROLL_RAY_NAMESPACE": "pipeline_demo_NS",
        env.CONTROL_PLANE: "rlix",
        env.RESIDUAL: "9",
    }
    assert config == {"system_envs": {"PIPELINE_ID": "theirs", "OTHER": "kept"}}
    assert coordinator.create_pipeline_actor(pipeline_config={}) is actor
