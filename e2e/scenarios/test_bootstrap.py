"""The documented start of a trainer that shares its GPUs with engines (docs/examples), on a live fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file

from e2e.cluster.local import LocalCluster
from e2e.scenarios.bootstrapper import STEPS, weights
from e2e.scenarios.kit import ROOT, Fleet, wait_until
from e2e.scenarios.test_rounds import checksum_from_disk

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NODE = "hollow-000"
GPUS = [f"GPU-{NODE}-00", f"GPU-{NODE}-01"]
EXAMPLES = ROOT / "docs/examples"


def example_objects() -> list[dict[str, Any]]:
    """bootstrap.yaml with devices, images and engines that this cluster has; all else as documented."""
    pipeline, pool = yaml.safe_load_all((EXAMPLES / "bootstrap.yaml").read_text())
    here = [{"node": NODE, "devices": GPUS}]
    pipeline["spec"]["trainer"]["gpus"] = here
    pool["spec"]["placement"]["devices"] = here
    (engine,) = pool["spec"]["source"]["template"]["spec"]["containers"]
    engine |= {"image": "rlfleet/reference-engine", "command": ["python", "-m", "e2e.sim.engine"]}
    saver = engine["args"][-1]
    assert saver == "--enable-memory-saver"
    engine["args"] = [
        "--host=$(RLFLEET_POD_IP)", "--port=30000", "--backend=numpy", "--no-health-generation",
        "--mem-fraction-static=0.8", saver,
    ]  # fmt: skip
    pool["spec"]["gate"] = {"image": "rlfleet/gate", "stagingMiB": 64}
    return [pipeline, pool]


def trainer(namespace: str, journal: Path) -> dict[str, Any]:
    """The pod that runs bootstrap_trainer.py with the reference model."""
    fields = {"NAMESPACE": "metadata.namespace", "RLFLEET_POD_IP": "status.podIP", "RLFLEET_POD_UID": "metadata.uid"}
    fields |= {"RLFLEET_POD_NAME": "metadata.name", "RLFLEET_NODE_NAME": "spec.nodeName"}
    env: list[dict[str, Any]] = [{"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()]
    env += [{"name": "NVIDIA_VISIBLE_DEVICES", "value": ",".join(GPUS)}, {"name": "JOURNAL", "value": str(journal)}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trainer", "namespace": namespace, "labels": {"app": "demo-trainer"}},
        "spec": {
            "serviceAccountName": "trainer",
            "nodeName": NODE,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "trainer",
                    "image": "rlfleet/trainer",
                    "command": ["python", "-m", "e2e.scenarios.bootstrapper"],
                    "env": env,
                }
            ],
        },
    }


def may_list_pools(namespace: str) -> list[dict[str, Any]]:
    """The reference job waits for engines by their pool's counts; the documented Role does not need that."""
    api = "rbac.authorization.k8s.io"
    meta = {"name": "trainer-pools", "namespace": namespace}
    rule = {"apiGroups": ["rlfleet.dev"], "resources": ["enginepools"], "verbs": ["list"]}
    return [
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "trainer-pools"},
            "subjects": [{"kind": "ServiceAccount", "name": "trainer"}],
        },
    ]


def test_the_documented_bootstrap_brings_the_trainers_base_to_engines_that_slept_until_then(
    fleet: Fleet, cluster: LocalCluster, tmp_path: Path
) -> None:
    namespace, journal = fleet.namespace, tmp_path / "journal"
    cluster.kubectl("apply", "-n", namespace, "-f", str(EXAMPLES / "trainer-rbac.yaml"))
    for made in (*may_list_pools(namespace), *example_objects()):
        made["metadata"]["namespace"] = namespace
        cluster.apply(made)

    def states() -> list[str]:
        return [e["state"] for e in fleet.status("enginepool", "demo-engines").get("engines") or []]

    def pods() -> list[dict[str, Any]]:
        return list(cluster.get("pods", "-n", namespace, "-l", "rlfleet.dev/pool=demo-engines")["items"])

    def said() -> list[str]:
        return journal.read_text().splitlines() if journal.exists() else []

    def committed() -> int | None:
        found = fleet.status("rlpipeline", "demo").get("committed")
        return None if found is None else int(found["version"])

    wait_until(lambda: states() == ["Offloaded"] * 2, "the engines to boot and sleep", 180)
    cluster.apply(trainer(namespace, journal))
    wait_until(lambda: committed() == -1, "the base to be committed", 180)
    assert said()[:2] == ["built", "offloaded"], "the trainer had its GPUs, and left them"
    assert states() == ["Offloaded"] * 2
    assert [fleet.label(p) for p in pods()] == ["default"] * 2, "nobody has synced them"

    # The command of the example's docstring wakes them.
    (command,) = re.findall(r"^ *kubectl (patch .*)$", (EXAMPLES / "bootstrap_trainer.py").read_text(), re.MULTILINE)
    words = [w.strip("'") for w in command.split()]
    cluster.kubectl(*words, "-n", namespace)
    wait_until(lambda: fleet.pod("trainer")["status"]["phase"] == "Succeeded", "the trainer to end well", 240)
    steps = [("waits for rollouts of step {}", "rollouts of step {}", "trained {}", "offloaded")] * STEPS
    lines = [line.format(step) for step, each in enumerate(steps) for line in each]
    last = [f"waits for rollouts of step {STEPS}", f"rollouts of step {STEPS}"]
    assert said() == ["built", "offloaded", *lines, *last]
    assert committed() == STEPS - 1
    for pod in pods():
        fleet.serving(pod, STEPS - 1)
    save_file({k: v.contiguous() for k, v in weights(STEPS - 1).items()}, str(tmp_path / "model.safetensors"))
    assert {fleet.checksum(p) for p in pods()} == {checksum_from_disk(tmp_path)}
    # The base came from the trainer: a round that nobody was in, then a CatchUp of both.
    rounds = cluster.get("syncrounds", "-n", namespace)["items"]
    base = [r for r in rounds if r["spec"]["version"] == -1]
    assert {r["spec"]["kind"] for r in base} == {"Refresh", "CatchUp"}
    assert all(r["status"]["phase"] == "Succeeded" for r in base)
