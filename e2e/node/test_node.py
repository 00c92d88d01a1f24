"""Life on a real node: an older release upgraded in mid-round, the quickstart, faults, uninstall.

The tests of this file are one story, in order, on one node: each begins where the one before it ended. The first four
(an older release) and those with the mark ``node_faults`` can be left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from e2e.cluster.controlplane import ClusterError
from e2e.cluster.local import ROOT
from e2e.cluster.programs import ensure_programs
from e2e.node.cluster import RealNode
from e2e.node.kit import (
    EARLIER_TAG,
    QUICKSTART,
    RELEASE,
    SYSTEM,
    TERMINAL,
    VALUES,
    Fleet,
    Obj,
    condition,
    container,
    helm,
    until,
)
from rlfleet.api.labels import WEIGHTS_CURRENT
from rlfleet.plan.template import PLUGIN_DIR

# Not of the fixture, which builds and brings images.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(480, func_only=True)]

OLD = "older"
NEW = "demo"
PLUGGED = "vllm"


@pytest.fixture(scope="module")
def old(node: RealNode) -> Fleet:
    """The fleet that an older operator made, in a namespace without Pod Security: its gates asked for more."""
    return Fleet(node, OLD)


@pytest.fixture(scope="module")
def fleet(node: RealNode) -> Fleet:
    """The quickstart's fleet, and this release to serve it (when the upgrade's tests were left out, installed now)."""
    if not operators(node, "operator:dev"):
        chart = str(ROOT / "charts" / "rlfleet")
        helm(node, "upgrade", chart, "--install", "--create-namespace", "--wait", "--timeout=200s", values=VALUES)
    node.kubectl("apply", "-f", str(QUICKSTART / "namespace.yaml"))
    return Fleet(node, NEW)


def operators(node: RealNode, image: str) -> list[str]:
    """Names of the operator's ready pods that run this image."""
    pods = node.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")["items"]
    return [
        p["metadata"]["name"]
        for p in pods
        if p["spec"]["containers"][0]["image"].endswith(image)
        and condition(p, "Ready").get("status") == "True"
        and "deletionTimestamp" not in p["metadata"]
    ]


def endpoints(node: RealNode) -> dict[str, bool]:
    """Pod -> whether it is ready, of those that the Service could send requests to."""
    slices = node.get("endpointslices.discovery.k8s.io", "-n", NEW, "-l", "kubernetes.io/service-name=engines")["items"]
    found = {e["targetRef"]["name"]: e["conditions"]["ready"] for s in slices for e in s.get("endpoints") or []}
    return {name: ready for name, ready in found.items() if ready}


def leader(node: RealNode) -> str:
    """The pod that holds the Lease."""
    lease = node.get("lease", "rlfleet-operator", "-n", SYSTEM)
    return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]


# ------------------------------------------------------------------------------------------------ upgrade


def test_an_earlier_release_is_installed_and_serves(node: RealNode, old: Fleet, earlier_chart: Path) -> None:
    node.kubectl("create", "namespace", OLD)
    node.helm("install", RELEASE, str(earlier_chart), f"--namespace={SYSTEM}", "--create-namespace", "--wait")
    # Time for an upgrade in the middle of a load, on a slow machine too.
    node.apply(old.pipeline_manifest(maxUnavailable=0, deadlines={"pausedSeconds": 900}))
    node.apply(*old.pool_manifest(gate=EARLIER_TAG))
    old.start_publisher()
    until(lambda: len(old.engines()) == 2, "two engine pods")
    ended = old.sync()
    assert ended["status"]["phase"] == "Succeeded", ended["status"]
    until(old.all_active, "both engines Active")


def test_an_upgrade_in_mid_round_finishes_it_with_the_old_gates(node: RealNode, old: Fleet) -> None:
    pods = {p["metadata"]["uid"] for p in old.engines()}
    # Helm never changes CRDs.
    crds = str(ROOT / "charts" / "rlfleet" / "crds")
    node.kubectl("apply", "--server-side", "--force-conflicts", "-f", crds)
    for pod in old.engines():
        old.fault(pod, {"update_weights_from_disk": {"action": "hold"}})
    name = old.order()
    until(lambda: old.phase(name) == "Transferring", "Transferring")

    helm(node, "upgrade", str(ROOT / "charts" / "rlfleet"), "--wait", "--timeout=200s", values=VALUES)

    until(lambda: len(operators(node, "operator:dev")) == 2, "two operators of the new image")
    until(lambda: leader(node) in operators(node, "operator:dev"), "one of them to lead")
    assert old.phase(name) not in TERMINAL
    for pod in old.engines():
        old.fault(pod, {})
    until(lambda: old.phase(name) == "Succeeded", "the round that an older operator began")
    until(old.all_active, "both engines Active")
    assert {p["metadata"]["uid"] for p in old.engines()} == pods, "an upgrade of the operator restarts no engine"
    assert all(container(p, "gate")["image"].endswith(f"operator:{EARLIER_TAG}") for p in old.engines())
    # And the next one is the new operator's from its beginning, still with old gates.
    assert old.sync()["status"]["phase"] == "Succeeded"


def test_helm_test_passes(node: RealNode) -> None:
    answer = helm(node, "test", "--timeout=120s")
    assert "Phase:          Succeeded" in answer, answer


def test_an_old_fleet_goes_with_its_objects(node: RealNode, old: Fleet) -> None:
    node.kubectl("delete", "enginepools,rlpipelines", "--all", "-n", OLD, "--timeout=120s", timeout=130)
    node.kubectl("delete", "namespace", OLD, "--timeout=120s", timeout=130)
    with pytest.raises(ClusterError):
        node.get("namespaces", OLD)


# ------------------------------------------------------------------------------------------------ quickstart


def test_the_quickstart_under_restricted_pod_security(node: RealNode, fleet: Fleet) -> None:
    node.kubectl("apply", "-n", NEW, "-f", str(ROOT / "docs" / "examples" / "trainer-rbac.yaml"))
    node.kubectl("apply", "-f", str(QUICKSTART / "pipeline.yaml"), "-f", str(QUICKSTART / "pool.yaml"))
    until(lambda: len(fleet.engines()) == 2, "two engine pods")
    for pod in fleet.engines():
        # A native sidecar: an init container that stays, and that started before the engine did.
        gate = next(c for c in pod["spec"]["initContainers"] if c["name"] == "gate")
        assert gate["restartPolicy"] == "Always"
        # Closed until the first weights came, and out of the Service.
        assert condition(pod, "Ready").get("status") == "False"
    assert endpoints(node) == {}
    for pod in fleet.engines():
        began = {n: container(pod, n)["state"]["running"]["startedAt"] for n in ("gate", "engine")}
        assert began["gate"] <= began["engine"]

    node.kubectl("apply", "-f", str(QUICKSTART / "trainer.yaml"))
    until(lambda: fleet.pipeline()["status"].get("committed", {}).get("version") == 2, "three versions of the trainer")
    until(fleet.all_active, "both engines Active")
    until(lambda: list(endpoints(node).values()) == [True, True], "both engines behind the Service")
    enforced = node.get("namespaces", NEW)["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"
    rounds = node.get("syncrounds", "-n", NEW)["items"]
    assert all(m["transport"] == "Serialized" for r in rounds for m in r["status"]["plan"].get("members", []))


def test_kubectl_reaches_into_pods(node: RealNode, fleet: Fleet) -> None:
    engine = fleet.engines()[0]["metadata"]["name"]
    assert "serving tiny (numpy)" in node.kubectl("logs", engine, "-n", NEW, "-c", "engine")
    assert "uid=65532" in node.kubectl("exec", engine, "-n", NEW, "-c", "gate", "--", "id")
    # The kernel tells a gate without any rights who listens beside it.
    assert "the engine listens" in node.kubectl("logs", engine, "-n", NEW, "-c", "gate")
    # By the Service's name, as the trainer does it.
    url = "http://engines.demo.svc.cluster.local:30000/model_info"
    script = f"import urllib.request as u; print(u.urlopen('{url}').status)"
    assert node.kubectl("exec", "trainer", "-n", NEW, "--", "python", "-c", script).strip() == "200"
    read_only = node.kubectl("exec", engine, "-n", NEW, "-c", "gate", "--", "sh", "-c", "touch /x 2>&1 || true")
    assert "Read-only" in read_only


def test_the_command_line_reaches_the_operator_through_a_forwarded_port(node: RealNode, fleet: Fleet) -> None:
    """``kubectl port-forward`` to the leader's pod, whose page listens on loopback alone; with a viewer's token."""
    node.kubectl("create", "serviceaccount", "viewer", "-n", NEW)
    node.kubectl("create", "rolebinding", "viewer", "-n", NEW, "--clusterrole=view", f"--serviceaccount={NEW}:viewer")
    token = node.kubectl("create", "token", "viewer", "-n", NEW).strip()
    told = subprocess.run(
        [sys.executable, "-m", "rlfleet.app.cli", "explain", "demo", "-n", NEW, f"--token={token}", "-o", "json"],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}",
            "KUBECONFIG": str(node.kubeconfig),
            "PATH": f"{ensure_programs()['kubectl'].parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in told.stderr, told.stderr
    planned = json.loads(told.stdout)
    assert sorted(e["engine"] for e in planned["engines"]) == sorted(p["metadata"]["name"] for p in fleet.engines())


# ------------------------------------------------------------------------------------------------ vLLM


@pytest.fixture(scope="module")
def plugged(node: RealNode, fleet: Fleet) -> Fleet:
    """A fleet of type VLLM in a namespace of its own. Its image has Python and the reference engine, and no vLLM."""
    restricted = node.get("namespaces", fleet.namespace)["metadata"]["labels"]
    labels = {k: v for k, v in restricted.items() if k.startswith("pod-security.kubernetes.io/")}
    node.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLUGGED, "labels": labels}})
    return Fleet(node, PLUGGED)


def with_vllm(pool: Obj) -> None:
    """The quickstart's pool, with vLLM's face of the reference engine behind the middleware that is brought into it."""
    pool["spec"]["engine"]["type"] = "VLLM"
    pool["spec"]["replicas"] = 1
    engine = pool["spec"]["source"]["template"]["spec"]["containers"][0]
    engine["args"] += ["--api=vllm", "--middleware=rlfleet_vllm.ControlKey"]
    # The image's own PYTHONPATH, which a variable of the pod replaces: named here, it stays behind ours.
    engine["env"] = [{"name": "PYTHONPATH", "value": "/opt/sim"}]


def test_the_plugin_comes_into_an_image_that_has_only_python(node: RealNode, plugged: Fleet) -> None:
    node.apply(plugged.pipeline_manifest())
    node.apply(*plugged.pool_manifest(change=with_vllm))
    plugged.start_publisher()
    until(lambda: len(plugged.engines()) == 1, "the engine's pod")
    assert plugged.sync()["status"]["phase"] == "Succeeded"
    until(lambda: plugged.all_active(1), "the engine Active")

    (pod,) = plugged.engines()
    brought = container(pod, "rlfleet-vllm")["state"]["terminated"]
    assert brought["exitCode"] == 0, brought
    # An engine starts with the folder first in its path, and finds the entry point by which vLLM loads plug-ins.
    script = (
        "import os, rlfleet_vllm; from importlib.metadata import distribution as d; print(os.environ['PYTHONPATH'], "
        "rlfleet_vllm.__file__, [e.value for e in d('rlfleet-vllm').entry_points.select(group='vllm.general_plugins')])"
    )
    name = pod["metadata"]["name"]
    told = node.kubectl("exec", name, "-n", PLUGGED, "-c", "engine", "--", "python", "-c", script).strip()
    assert told == f"{PLUGIN_DIR}:/opt/sim {PLUGIN_DIR}/rlfleet_vllm/__init__.py ['rlfleet_vllm:register']"
    # The middleware from that folder stands in front of the engine: its gate commands it, and nobody else.
    base = f"http://{pod['status']['podIP']}:30000"
    for path in ("/pause", "/collective_rpc", "/update_weight_version"):
        answer = httpx.post(base + path, json={}, timeout=30.0, trust_env=False)
        assert (answer.status_code, "the gate's" in answer.text) == (401, True), answer.text
    assert httpx.get(f"{base}/v1/models", timeout=30.0, trust_env=False).status_code == httpx.codes.OK
    until(lambda: plugged.pool()["status"].get("fencing") == "Enforced", "the door to be seen shut")

    node.kubectl("delete", "enginepools,rlpipelines", "--all", "-n", PLUGGED, "--timeout=120s", timeout=130)
    node.kubectl("delete", "namespace", PLUGGED, "--timeout=120s", timeout=130)


# ------------------------------------------------------------------------------------------------ faults


@pytest.fixture(scope="module")
def steered(node: RealNode, fleet: Fleet) -> Fleet:
    """The same fleet with engines that take faults, and a sender that publishes when a test says so."""
    node.kubectl("delete", "pod", "trainer", "-n", NEW, "--ignore-not-found", "--timeout=60s")
    node.kubectl("delete", "enginepools,rlpipelines", "--all", "-n", NEW, "--timeout=120s", timeout=130)
    node.apply(fleet.pipeline_manifest(maxUnavailable=0))
    node.apply(*fleet.pool_manifest())
    fleet.start_publisher()
    until(lambda: len(fleet.engines()) == 2, "two engine pods")
    assert fleet.sync()["status"]["phase"] == "Succeeded"
    until(fleet.all_active, "both engines Active")
    return fleet


def replaced(fleet: Fleet, victim: Obj) -> None:
    """Waits until another pod plays the victim's engine and both engines are Active again."""

    def done() -> bool:
        # By the pool's own rows: a new pod may be there before they tell that the old one has ended.
        shown = {row["podUID"] for row in fleet.pool()["status"].get("engines") or []}
        return victim["metadata"]["uid"] not in shown and fleet.all_active()

    until(done, "both engines Active again, one of them in a new pod")


def told(fleet: Fleet, *words: str) -> None:
    """Waits for the Event that tells people about a failed pod in these words."""
    until(
        lambda: any(
            all(w in e["note" if "note" in e else "message"] for w in words) for e in fleet.events("PodFailed")
        ),
        f"an Event PodFailed that says {words}",
    )


@pytest.mark.node_faults
def test_an_engine_that_runs_out_of_memory_is_replaced_and_says_so(steered: Fleet) -> None:
    victim = steered.engines()[0]
    # Pages of a memory volume belong to no process, so the kernel takes the container's largest one: the engine.
    steered.write(victim, "/tmp/fill", 400)
    told(steered, "engine", "OOMKilled")
    replaced(steered, victim)


@pytest.mark.node_faults
def test_a_killed_gate_restarts_in_place_and_the_engine_goes_on(steered: Fleet) -> None:
    victim = steered.engines()[0]
    steered.node.kill_container(container(victim, "gate")["containerID"])

    def back() -> bool:
        pod = steered.node.get("pods", victim["metadata"]["name"], "-n", NEW)
        gate = container(pod, "gate")
        return gate["restartCount"] == 1 and gate["ready"] and condition(pod, "Ready").get("status") == "True"

    until(back, "the gate's container to be ready again")
    pod = steered.node.get("pods", victim["metadata"]["name"], "-n", NEW)
    assert pod["metadata"]["uid"] == victim["metadata"]["uid"]
    assert container(pod, "engine")["containerID"] == container(victim, "engine")["containerID"]
    # It kept its record: the engine serves on, and takes the next version.
    until(steered.all_active, "both engines Active")
    until(lambda: list(endpoints(steered.node).values()) == [True, True], "both engines behind the Service")
    admitted = {p["metadata"]["uid"]: condition(p, WEIGHTS_CURRENT)["lastTransitionTime"] for p in steered.engines()}
    assert steered.sync()["status"]["phase"] == "Succeeded"
    until(steered.all_active, "both engines Active")
    # A round alone takes nobody out of the Service.
    now = {p["metadata"]["uid"]: condition(p, WEIGHTS_CURRENT)["lastTransitionTime"] for p in steered.engines()}
    assert now == admitted


@pytest.mark.node_faults
def test_an_engine_that_lost_its_weights_leaves_the_service_and_comes_back(steered: Fleet) -> None:
    victim = steered.engines()[0]
    name = victim["metadata"]["name"]
    until(lambda: name in endpoints(steered.node), "the Service to lead to it")
    victim = steered.node.get("pods", name, "-n", NEW)
    admitted = condition(victim, WEIGHTS_CURRENT)["lastTransitionTime"]
    # A label that its gate did not write: whatever was proven of this engine is void.
    url = f"http://{victim['status']['podIP']}:30000/update_weight_version"
    httpx.post(
        url, json={"new_version": "default", "abort_all_requests": False}, timeout=30.0, trust_env=False
    ).raise_for_status()

    def again() -> bool:
        now = condition(steered.node.get("pods", name, "-n", NEW), WEIGHTS_CURRENT)
        return bool(now["status"] == "True" and now["lastTransitionTime"] > admitted)

    until(again, "the engine to be withdrawn, filled and admitted again")
    until(lambda: name in endpoints(steered.node), "the Service to lead to it again")
    assert steered.node.get("pods", name, "-n", NEW)["metadata"]["uid"] == victim["metadata"]["uid"]


@pytest.mark.node_faults
def test_an_evicted_pod_is_replaced_and_says_so(steered: Fleet) -> None:
    victim = steered.engines()[0]
    steered.write(victim, "/scratch/fill", 64)
    # Whichever way the kubelet tells it: its status has no such word where all containers ended in time, with code 0.
    told(steered, victim["metadata"]["name"], "Evicted", 'volume "scratch"')
    replaced(steered, victim)


@pytest.mark.node_faults
def test_weights_that_do_not_fit_are_refused_before_anything_is_paused(steered: Fleet) -> None:
    ended = steered.sync(bulk_mib=80)
    assert ended["status"]["phase"] == "Failed"
    failure = ended["status"]["failure"]
    assert "spec.gate.stagingMiB" in failure["message"], failure
    assert not ended["status"].get("timings", {}).get("pausedMs")
    until(steered.all_active, "both engines still Active at the version before")


@pytest.mark.node_faults
def test_a_rebooted_node_comes_back_closed_and_is_filled_again(node: RealNode, steered: Fleet) -> None:
    before = {p["metadata"]["uid"] for p in steered.engines()}
    committed = steered.pipeline()["status"]["committed"]

    node.reboot()

    until(lambda: len(operators(node, "operator:dev")) == 2, "two operators")

    def again() -> bool:
        pods = steered.engines()
        return len(pods) == 2 and not before & {p["metadata"]["uid"] for p in pods} and "Loading" in steered.states()

    until(again, "two new engines, closed")
    # Nobody serves: the memory that held the weights is empty, and so is the sender's.
    assert steered.pipeline()["status"]["committed"] == committed
    assert "Active" not in steered.states()
    assert endpoints(node) == {}
    node.kubectl("delete", "pod", "trainer", "-n", NEW, "--timeout=60s")
    steered.start_publisher()
    assert steered.sync()["status"]["phase"] == "Succeeded"
    until(steered.all_active, "both engines Active")


# ------------------------------------------------------------------------------------------------ the end


def test_uninstall_leaves_nothing(node: RealNode, fleet: Fleet) -> None:
    node.kubectl("delete", "enginepools,rlpipelines", "--all", "-n", NEW, "--timeout=120s", timeout=130)
    helm(node, "uninstall", "--wait", "--timeout=120s")
    node.kubectl("delete", "namespace", NEW, "--timeout=120s", timeout=130)
    kinds = ("deployments", "pods", "jobs", "services", "serviceaccounts", "secrets", "roles", "rolebindings", "leases")
    left = [
        f"{item['kind']} {item['metadata']['name']}"
        for item in node.get(",".join((*kinds, "poddisruptionbudgets", "configmaps")), "-n", SYSTEM)["items"]
        if item["metadata"]["name"] not in ("default", "kube-root-ca.crt")
    ]
    assert left == []
    wide = node.get("clusterroles,clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    assert wide == []
