"""A script written for rlix's coordinator trains on a live fleet, where the drop-in answers its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.demo.report import reward_rises
from e2e.scenarios.kit import Fleet, condition, wait_until
from e2e.scenarios.routers import Router, urls
from e2e.scenarios.test_elastic import SYNC, elastic_pool
from e2e.scenarios.test_rounds import checksum_from_disk
from e2e.scenarios.test_trainer_demand import NODE, OWN, SHARED

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 8


def trainer(fleet: Fleet, router: Router, folder: Path, *, deferred: bool) -> dict[str, Any]:
    fields = {"RLFLEET_POD_IP": "status.podIP", "RLFLEET_POD_UID": "metadata.uid", "RLFLEET_POD_NAME": "metadata.name"}
    fields |= {"RLFLEET_NAMESPACE": "metadata.namespace", "RLFLEET_NODE_NAME": "spec.nodeName"}
    values = {
        "RLFLEET_PIPELINE": "p",
        "ROUTER_URL": router.url,
        "STEPS": str(STEPS),
        "JOURNAL": str(folder / "journal"),
        "CHECKPOINT": str(folder / "checkpoint"),
        "NVIDIA_VISIBLE_DEVICES": f"{SHARED},{OWN}",
        "OMP_NUM_THREADS": "1",
        # The coordinator's own names.
        "RLIX_MILES_UPDATE_TRANSPORT": "cpu_serialize",
        "MILES_MAX_RESIDUAL_GPU_MEM_GB": "13",
        **({"MILES_INIT_DEFER_ADD_WORKER": "1"} if deferred else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trainer", "namespace": fleet.namespace, "labels": {"app": "trainer"}},
        "spec": {
            "serviceAccountName": "trainer",
            "nodeName": NODE,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "trainer",
                    "image": "rlfleet/trainer",
                    "command": ["python", "-m", "e2e.scenarios.miles_trainer"],
                    "env": [
                        *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()),
                        *({"name": k, "value": v} for k, v in values.items()),
                    ],
                }
            ],
        },
    }


def rights(fleet: Fleet) -> list[dict[str, Any]]:
    """What docs/reference/compat.md says that the trainer needs, and nothing more."""
    group, meta = "rbac.authorization.k8s.io", {"name": "trainer", "namespace": fleet.namespace}
    allowed = {
        "rlpipelines": ["get", "list", "watch", "sync"],
        "syncrounds": ["create", "get", "list", "watch"],
        "trainerdemands": ["create", "get", "patch"],
        "enginepools": ["get", "list", "watch"],
    }
    rules = [{"apiGroups": ["rlfleet.dev"], "resources": [k], "verbs": v} for k, v in allowed.items()]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "trainer"},
            "subjects": [{"kind": "ServiceAccount", "name": "trainer"}],
        },
    ]


@pytest.mark.parametrize("deferred", [False, True], ids=["active", "deferred"])
def test_a_script_for_the_coordinator_trains_unchanged(
    fleet: Fleet, cluster: LocalCluster, tmp_path: Path, deferred: bool
) -> None:
    fleet.pipeline(trainer={"gpus": [{"node": NODE, "devices": [SHARED, OWN]}]}, sync=SYNC)
    router = Router(fleet)
    place = {"mode": "Pinned", "devices": [{"node": NODE, "devices": [SHARED, OWN]}]}
    args = ("--mem-fraction-static", "0.8")
    elastic_pool(fleet, 2, router=True, backend="torch", engine_args=args, placement=place)
    for made in rights(fleet):
        cluster.apply(made)
    pods = fleet.ready_engines(2)
    cluster.apply(trainer(fleet, router, tmp_path, deferred=deferred))

    def ended() -> str | None:
        phase = fleet.pod("trainer")["status"]["phase"]
        return phase if phase in ("Succeeded", "Failed") else None

    phase = wait_until(ended, "the script to end", 300)
    assert phase == "Succeeded", cluster.hollow.log(fleet.namespace, "trainer", "trainer").read_text()[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    curve = [line["meanReward"] for line in lines if "meanReward" in line]
    assert len(curve) == STEPS
    assert reward_rises(curve), curve
    # Every step is served by engines that were asleep while it was trained, and the last one by all of them.
    assert [p["metadata"]["uid"] for p in fleet.engines()] == [p["metadata"]["uid"] for p in pods]
    assert {fleet.label(p) for p in pods} == {str(STEPS - 1)}
    assert {fleet.checksum(p) for p in pods} == {checksum_from_disk(tmp_path / "checkpoint")}
    assert router.listed() == urls(pods)
    rounds = cluster.get("syncrounds", "-n", fleet.namespace)["items"]
    refreshes = sorted(r["spec"]["version"] for r in rounds if r["spec"]["kind"] == "Refresh")
    assert refreshes == list(range(-1, STEPS)), "one sync for each step, and none twice"
    demand = fleet.get("trainerdemand", "p")["spec"]
    assert (demand.get("requests") or [], demand.get("streams") or []) == ([], [])
    wait_until(lambda: condition(fleet.get("enginepool", "e"), "Ready") == "True", "all engines active")
