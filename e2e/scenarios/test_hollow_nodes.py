"""The hollow kubelet keeps a kubelet's promises, seen through the real apiserver and the machine's process table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import processes
from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import ROOT, ClusterError, LocalCluster, memory_folder
from e2e.cluster.waiting import wait_until

pytestmark = pytest.mark.cluster

Object = dict[str, Any]

SLEEP = ["sleep", "100000"]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def container(name: str, command: list[str], **more: Any) -> Object:
    return {"name": name, "image": "none", "command": command, **more}


class Pods:
    """Creates pods in the test's namespace, with one host folder mounted at /shared in every container."""

    def __init__(self, cluster: LocalCluster, namespace: str, shared: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.shared = shared

    def create(self, name: str, *mains: Object, inits: tuple[Object, ...] = (), **spec: Any) -> None:
        for each in (*mains, *inits):
            each.setdefault("volumeMounts", []).append({"name": "shared", "mountPath": "/shared"})
            each.setdefault("env", []).insert(0, {"name": "SHARED", "value": "/shared"})
        volumes = [*spec.pop("volumes", []), {"name": "shared", "hostPath": {"path": str(self.shared)}}]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "terminationGracePeriodSeconds": 10,
                "initContainers": list(inits),
                "containers": list(mains),
                "volumes": volumes,
                **spec,
            },
        }
        self.cluster.apply(pod)

    def get(self, name: str) -> Object:
        pod: Object = self.cluster.get("pod", name, "-n", self.namespace)
        return pod

    def names(self) -> list[str]:
        return [p["metadata"]["name"] for p in self.cluster.get("pods", "-n", self.namespace)["items"]]

    def container(self, name: str, which: str) -> Object:
        status = self.get(name).get("status", {})
        everyone = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
        found: Object = next((c for c in everyone if c["name"] == which), {})
        return found

    def condition(self, name: str, kind: str) -> str:
        conditions = self.get(name)["status"].get("conditions", [])
        return next((str(c["status"]) for c in conditions if c["type"] == kind), "absent")

    def wait_ready(self, name: str, ready: str = "True") -> None:
        wait_until(lambda: self.condition(name, "Ready") == ready, f"pod {name} Ready={ready}")

    def wait_phase(self, name: str, phase: str) -> Object:
        wait_until(lambda: self.get(name)["status"]["phase"] == phase, f"pod {name} {phase}")
        return self.get(name)

    def lines(self, file: str) -> list[str]:
        path = self.shared / file
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, name: str, which: str) -> int:
        return self.cluster.hollow.pid(self.namespace, name, which)

    def log(self, name: str, which: str) -> str:
        return self.cluster.hollow.log(self.namespace, name, which).read_text()


@pytest.fixture
def pods(cluster: LocalCluster, namespace: str, tmp_path: Path) -> Pods:
    return Pods(cluster, namespace, tmp_path)


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def test_containers_start_in_order_and_a_sidecar_holds_the_rest_until_its_startup_probe_passes(pods: Pods) -> None:
    def note(name: str) -> str:
        return f'echo {name} >> "$SHARED/order"; '

    gate = container(
        "gate",
        shell(note("gate") + "exec sleep 100000"),
        restartPolicy="Always",
        startupProbe={
            "exec": {"command": ["sh", "-c", 'test -e "$SHARED/open"']},
            "periodSeconds": 1,
            "failureThreshold": 1000,
        },
    )
    pods.create(
        "ordered",
        container("engine", shell(note("engine") + "exec sleep 100000")),
        inits=(container("first", shell(note("first"))), gate, container("last", shell(note("last")))),
        restartPolicy="Never",
    )
    wait_until(lambda: "running" in pods.container("ordered", "gate").get("state", {}), "gate running")
    held = pods.get("ordered")
    assert held["status"]["phase"] == "Pending"
    assert pods.container("ordered", "gate")["started"] is False
    assert pods.container("ordered", "engine")["state"] == {"waiting": {"reason": "PodInitializing"}}
    assert pods.condition("ordered", "Initialized") == "False"
    assert pods.lines("order") == ["first", "gate"]

    (pods.shared / "open").touch()
    pods.wait_ready("ordered")
    assert pods.lines("order") == ["first", "gate", "last", "engine"]
    assert pods.container("ordered", "gate")["started"] is True
    assert pods.container("ordered", "first")["state"]["terminated"]["exitCode"] == 0
    assert pods.condition("ordered", "Initialized") == "True"
    assert pods.get("ordered")["status"]["phase"] == "Running"


def test_a_failing_startup_probe_ends_the_container(pods: Pods) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    pods.create("never-up", container("engine", SLEEP, startupProbe=probe), restartPolicy="Never")
    pods.wait_phase("never-up", "Failed")
    assert pods.container("never-up", "engine")["state"]["terminated"]["exitCode"] == 128 + signal.SIGTERM


def test_readiness_follows_the_probe_both_ways(pods: Pods) -> None:
    probe = {"exec": {"command": ["sh", "-c", 'test -e "$SHARED/ready"']}, "periodSeconds": 1, "failureThreshold": 1}
    pods.create("probed", container("engine", SLEEP, readinessProbe=probe))
    pods.wait_phase("probed", "Running")
    assert pods.condition("probed", "Ready") == "False"
    assert pods.container("probed", "engine")["started"] is True
    (pods.shared / "ready").touch()
    pods.wait_ready("probed")
    (pods.shared / "ready").unlink()
    pods.wait_ready("probed", "False")
    assert pods.container("probed", "engine")["restartCount"] == 0


def test_exit_codes_decide_the_phase_after_sidecars_have_ended(pods: Pods) -> None:
    sidecar = container("gate", SLEEP, restartPolicy="Always")
    pods.create("three", container("engine", shell("exit 3")), inits=(sidecar,), restartPolicy="Never")
    pods.create("zero", container("engine", shell("exit 0")), restartPolicy="Never")
    pods.create("missing", container("engine", ["no-such-program"]), restartPolicy="Never")
    pods.create("bad-init", container("engine", SLEEP), inits=(container("i", shell("exit 4")),), restartPolicy="Never")

    pods.wait_phase("three", "Failed")
    assert pods.container("three", "engine")["state"]["terminated"]["exitCode"] == 3
    assert pods.container("three", "engine")["restartCount"] == 0
    assert "terminated" in pods.container("three", "gate")["state"]
    assert pods.condition("three", "Ready") == "False"
    pods.wait_phase("zero", "Succeeded")
    pods.wait_phase("missing", "Failed")
    assert pods.container("missing", "engine")["state"]["terminated"]["reason"] == "StartError"
    pods.wait_phase("bad-init", "Failed")
    assert "waiting" in pods.container("bad-init", "engine")["state"]


def test_restart_policy_on_failure_restarts_until_it_succeeds(pods: Pods) -> None:
    script = 'echo x >> "$SHARED/tries"; test "$(wc -l < "$SHARED/tries")" -ge 3'
    pods.create("retrying", container("engine", shell(script)), restartPolicy="OnFailure")
    pods.wait_phase("retrying", "Succeeded")
    assert len(pods.lines("tries")) == 3
    assert pods.container("retrying", "engine")["restartCount"] == 2
    assert pods.container("retrying", "engine")["lastState"]["terminated"]["exitCode"] == 1


def test_a_killed_sidecar_restarts_in_place_while_the_engine_runs_on(pods: Pods) -> None:
    pods.create(
        "pair",
        container("engine", SLEEP),
        inits=(container("gate", SLEEP, restartPolicy="Always"),),
        restartPolicy="Never",
    )
    pods.wait_ready("pair")
    before, engine, gate = pods.get("pair"), pods.pid("pair", "engine"), pods.pid("pair", "gate")
    pods.cluster.hollow.crash(pods.namespace, "pair", "gate")
    wait_until(lambda: pods.container("pair", "gate")["restartCount"] == 1, "gate restarted")
    pods.wait_ready("pair")
    assert pods.pid("pair", "engine") == engine
    assert pods.pid("pair", "gate") != gate
    assert pods.container("pair", "gate")["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    assert pods.container("pair", "engine")["restartCount"] == 0
    after = pods.get("pair")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podIP"] == before["status"]["podIP"]


def test_a_crash_takes_the_children_along_and_fails_a_pod_that_never_restarts(pods: Pods) -> None:
    pods.create(
        "parent",
        container("engine", shell('sleep 100000 & echo $! > "$SHARED/child"; wait')),
        restartPolicy="Never",
    )
    child = int(wait_until(lambda: pods.lines("child"), "the child's pid")[0])
    pods.wait_ready("parent")
    assert runs(child)
    pods.cluster.hollow.crash(pods.namespace, "parent", "engine")
    pods.wait_phase("parent", "Failed")
    assert pods.container("parent", "engine")["state"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    wait_until(lambda: not runs(child), "the child's end")
    pods.cluster.hollow.thaw(pods.namespace, "parent", "engine")
    with pytest.raises(HollowError, match="does not run"):
        pods.cluster.hollow.crash(pods.namespace, "parent", "engine")


def test_a_failing_liveness_probe_restarts_the_container(pods: Pods) -> None:
    probe = {"exec": {"command": ["sh", "-c", 'test ! -e "$SHARED/sick"']}, "periodSeconds": 1, "failureThreshold": 1}
    pods.create("living", container("engine", SLEEP, livenessProbe=probe))
    pods.wait_ready("living")
    (pods.shared / "sick").touch()
    wait_until(lambda: pods.container("living", "engine")["restartCount"] >= 1, "restart")
    (pods.shared / "sick").unlink()
    pods.wait_ready("living")


def test_deletion_stops_main_containers_before_sidecars_and_sidecars_in_reverse(pods: Pods) -> None:
    def on_term(name: str) -> list[str]:
        return shell(
            f'trap \'echo {name} >> "$SHARED/ended"; exit 0\' TERM; touch "$SHARED/{name}"; sleep 100000 & wait'
        )

    pods.create(
        "orderly",
        container("engine", on_term("engine")),
        inits=tuple(container(n, on_term(n), restartPolicy="Always") for n in ("outer", "inner")),
    )
    wait_until(lambda: all((pods.shared / n).exists() for n in ("engine", "outer", "inner")), "all traps set")
    pods.wait_ready("orderly")
    pods.cluster.kubectl("delete", "pod", "orderly", "-n", pods.namespace)
    assert pods.lines("ended") == ["engine", "inner", "outer"]
    assert pods.names() == []


def test_deletion_kills_what_ignores_sigterm_after_the_grace_period(pods: Pods) -> None:
    pods.create(
        "stubborn",
        container("engine", shell("trap '' TERM; touch \"$SHARED/set\"; while :; do sleep 1; done")),
        terminationGracePeriodSeconds=1,
    )
    wait_until((pods.shared / "set").exists, "trap set")
    pods.wait_ready("stubborn")
    pid = pods.pid("stubborn", "engine")
    pods.cluster.kubectl("delete", "pod", "stubborn", "-n", pods.namespace)
    assert not runs(pid)


def test_a_frozen_container_answers_nothing_and_goes_on_after_the_thaw(pods: Pods) -> None:
    server = ["python", "-m", "http.server", "30000", "--bind", "$(IP)"]
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    pods.create(
        "icy",
        container(
            "engine",
            server,
            env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            ports=[{"name": "http", "containerPort": 30000}],
            readinessProbe=probe,
            livenessProbe={**probe, "failureThreshold": 3, "terminationGracePeriodSeconds": 1},
        ),
    )
    pods.wait_ready("icy")
    pid = pods.pid("icy", "engine")
    pods.cluster.hollow.freeze(pods.namespace, "icy", "engine", spared=True)
    pods.wait_ready("icy", "False")
    assert runs(pid)
    # The kernel still accepts the connection: only the process is silent, as with a hung engine.
    socket.create_connection((pods.get("icy")["status"]["podIP"], 30000), timeout=5).close()
    pods.cluster.hollow.thaw(pods.namespace, "icy", "engine")
    pods.wait_ready("icy")
    assert pods.pid("icy", "engine") == pid
    assert pods.container("icy", "engine")["restartCount"] == 0
    # Its liveness probe ends one that is not spared.
    pods.cluster.hollow.freeze(pods.namespace, "icy", "engine")
    wait_until(lambda: pods.container("icy", "engine")["restartCount"] >= 1, "restart")


def test_the_mounted_service_account_token_is_accepted_by_the_apiserver(pods: Pods) -> None:
    script = (
        "import json, os, ssl, urllib.request\n"
        "folder = os.environ['RLFLEET_SERVICE_ACCOUNT_DIR']\n"
        "assert folder == os.environ['MOUNT'], folder\n"
        "read = lambda name: open(os.path.join(folder, name)).read()\n"
        "url = 'https://%(KUBERNETES_SERVICE_HOST)s:%(KUBERNETES_SERVICE_PORT)s' % os.environ\n"
        "body = {'apiVersion': 'authentication.k8s.io/v1', 'kind': 'SelfSubjectReview'}\n"
        "request = urllib.request.Request(url + '/apis/authentication.k8s.io/v1/selfsubjectreviews',\n"
        "    json.dumps(body).encode(), {'Authorization': 'Bearer ' + read('token'),\n"
        "    'Content-Type': 'application/json'})\n"
        "context = ssl.create_default_context(cadata=read('ca.crt'))\n"
        "answer = json.load(urllib.request.urlopen(request, context=context, timeout=30))\n"
        "print(read('namespace'), answer['status']['userInfo']['username'])\n"
    )
    mount = {"name": "MOUNT", "value": "/var/run/secrets/kubernetes.io/serviceaccount"}
    pods.create("asking", container("main", ["python", "-c", script], env=[mount]), restartPolicy="Never")
    pods.wait_phase("asking", "Succeeded")
    name = pods.namespace
    assert pods.log("asking", "main").strip() == f"{name} system:serviceaccount:{name}:default"


def test_environment_volumes_and_devices(pods: Pods) -> None:
    pods.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "settings", "namespace": pods.namespace},
            "data": {"color": "blue", "file": "text in a file"},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hidden", "namespace": pods.namespace},
            "stringData": {"word": "sesame"},
        },
    )
    env: list[Object] = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "URL", "value": "http://$(IP):30000/$(UNKNOWN)/$$(IP)"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "word"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "no", "key": "no", "optional": True}}},
        {"name": "STAGING", "value": "/staging/current"},
        {"name": "OTHER", "value": "/stagingarea /a/staging"},
        {"name": "CONFIG", "value": "/etc/settings"},
    ]
    dump = 'import json, os; print(json.dumps({**os.environ, "TEXT": open(os.environ["CONFIG"] + "/file").read()}))'
    volumes = [
        {"name": "staging", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "settings", "configMap": {"name": "settings"}},
    ]

    def create(name: str, extra: list[Object]) -> None:
        pods.create(
            name,
            container(
                "main",
                ["python", "-c", dump + "; import time; time.sleep(100000)"],
                env=[*env, *extra],
                resources={"limits": {"memory": "1Gi", "cpu": "1", "nvidia.com/gpu": "2"}},
                volumeMounts=[
                    {"name": "staging", "mountPath": "/staging"},
                    {"name": "settings", "mountPath": "/etc/settings"},
                ],
            ),
            volumes=volumes,
            nodeName="hollow-001",
        )

    def variables(name: str) -> Object:
        pods.wait_ready(name)
        text = wait_until(lambda: pods.log(name, "main"), f"output of {name}")
        result: Object = json.loads(text)
        return result

    create("one", [])
    create("two", [])
    create("pinned", [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-hollow-001-07"}])
    one, two, pinned = (variables(name) for name in ("one", "two", "pinned"))

    assert one["IP"] == pods.get("one")["status"]["podIP"]
    assert one["IP"] != two["IP"]
    assert one["URL"] == f"http://{one['IP']}:30000/$(UNKNOWN)/$(IP)"
    assert (one["NODE"], one["LIMIT"], one["COLOR"], one["WORD"]) == ("hollow-001", "1024", "blue", "sesame")
    assert "NONE" not in one
    assert one["TEXT"] == "text in a file"
    assert one["STAGING"].startswith("/dev/shm/")
    assert one["STAGING"].endswith("/staging/current")
    assert one["OTHER"] == "/stagingarea /a/staging"
    first, second = (set(v["NVIDIA_VISIBLE_DEVICES"].split(",")) for v in (one, two))
    assert len(first) == len(second) == 2
    assert first.isdisjoint(second)
    assert all(device.startswith("GPU-hollow-001-") for device in first | second)
    assert pinned["NVIDIA_VISIBLE_DEVICES"] == "GPU-hollow-001-07"

    staging = Path(one["STAGING"]).parent
    assert staging.is_dir()
    pods.cluster.kubectl("delete", "pod", "one", "-n", pods.namespace)
    wait_until(lambda: not staging.exists(), "the memory volume's end")


def test_a_container_waits_for_what_its_environment_refers_to(pods: Pods) -> None:
    reference = {"name": "V", "valueFrom": {"configMapKeyRef": {"name": "later", "key": "v"}}}
    pods.create("waiting", container("main", SLEEP, env=[reference]))

    def reason() -> str:
        state = pods.container("waiting", "main").get("state", {})
        return str(state.get("waiting", {}).get("reason"))

    wait_until(lambda: reason() == "CreateContainerConfigError", "the reason")
    pods.cluster.kubectl("create", "configmap", "later", "--from-literal=v=1", "-n", pods.namespace)
    pods.wait_ready("waiting")


def test_devices_of_an_ended_pod_are_free_for_the_next(pods: Pods) -> None:
    """All GPUs of one node, three times over: as soon as the object is gone, and as soon as the pod has ended."""

    def create(name: str, command: list[str]) -> None:
        limits = {"limits": {"nvidia.com/gpu": "8"}}
        pods.create(name, container("main", command, resources=limits), nodeName="hollow-003", restartPolicy="Never")

    create("first", SLEEP)
    pods.wait_ready("first")
    pods.cluster.kubectl("delete", "pod", "first", "-n", pods.namespace)
    create("second", shell("exit 0"))
    pods.wait_phase("second", "Succeeded")
    create("third", SLEEP)
    pods.wait_ready("third")
    # More than there are is an answer, not a wait for ever.
    create("fourth", SLEEP)
    assert pods.wait_phase("fourth", "Failed")["status"]["reason"] == "UnexpectedAdmissionError"


def test_memory_of_simulated_devices_is_shared_and_read_through_the_driver(pods: Pods) -> None:
    """What one pod holds on a GPU, another pod on it sees, and has that much less room."""
    hold = (
        "import os; from e2e.sim.device.ledger import Account, visible; held = Account(visible(os.environ), 'first');"
        "held.add(50 << 30); open('/shared/held', 'w').close(); import time; time.sleep(100000)"
    )
    look = (
        "import os; from e2e.sim.device.ledger import Account, DeviceOutOfMemory, visible\n"
        "from rlfleet.devices import Devices\n"
        "print(Devices('n').read().model_dump_json(), flush=True)\n"
        "try: Account(visible(os.environ), 'second').add(31 << 30)\n"
        "except DeviceOutOfMemory as e: print(e)"
    )
    here: dict[str, Any] = {"nodeName": "hollow-001", "restartPolicy": "Never"}

    def on_gpu(script: str) -> Object:
        env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-hollow-001-05"}]
        return container("main", ["python", "-c", script], env=env)

    pods.create("first", on_gpu(hold), **here)
    wait_until((pods.shared / "held").exists, "memory held")
    pods.create("second", on_gpu(look), **here)
    pods.wait_phase("second", "Succeeded")
    first, _, second = pods.log("second", "main").partition("\n")
    report = json.loads(first)
    assert (report["source"], report["uuids"]) == ("NVML", ["GPU-hollow-001-05"])
    assert report["memory"]["GPU-hollow-001-05"] == {"used_bytes": 50 << 30, "total_bytes": 80 << 30}
    assert [p["name"] for p in report["processes"]] == ["first"]
    assert "out of memory" in second


def test_a_node_that_reads_unknown_is_posted_ready_again(cluster: LocalCluster) -> None:
    def ready() -> tuple[str, str]:
        conditions = cluster.get("node", "hollow-002")["status"]["conditions"]
        return next((c["status"], c["reason"]) for c in conditions if c["type"] == "Ready")

    patch = {"status": {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}}
    mark = cluster.audit_mark()
    cluster.kubectl("patch", "node", "hollow-002", "--subresource=status", "--type=strategic", "-p", json.dumps(patch))
    wait_until(lambda: ready() == ("True", "KubeletReady"), "node Ready again")
    # And the log of requests tells who wrote: the admin once, the kubelet to put it right.
    writers = [e.user for e in cluster.audit(mark) if e.writes and (e.resource, e.subresource) == ("nodes", "status")]
    assert writers[0] == "admin"
    assert "rlfleet:hollow-kubelet" in writers


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ClusterError, match="not empty"):
        LocalCluster(tmp_path, nodes=0).up()
    LocalCluster(tmp_path).down()
    assert (tmp_path / "mine").read_text() == "keep"


def test_two_clusters_side_by_side_and_nothing_left_after_down(cluster: LocalCluster, tmp_path: Path) -> None:
    """The second one runs from the command line, gets a pod that hides from its process group, and is taken down."""

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "e2e.cluster", *arguments, "--state", str(state)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    state = tmp_path / "second"
    up = command("up", "--nodes", "1", "--bare")
    assert up.returncode == 0, up.stderr
    second = LocalCluster(state)
    mark = json.loads((state / "cluster.json").read_text())["mark"]
    try:
        assert command("status").returncode == 0
        hidden = tmp_path / "hidden"
        name = f"side-{uuid.uuid4().hex[:6]}"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "containers": [
                    container(
                        "main", shell(f"setsid sh -c 'echo $$$$ > {hidden}; exec sleep 100000' & exec sleep 100000")
                    )
                ]
            },
        }
        for each in (cluster, second):
            each.apply({**pod, "metadata": {"name": name, "namespace": "default"}})
        for each in (cluster, second):
            each.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=180s")
        addresses = {each.get("pod", name)["status"]["podIP"] for each in (cluster, second)}
        assert len({address.split(".")[1] for address in addresses}) == 2
        cluster.kubectl("delete", "pod", name, "--wait=false")

        # The first one's admin is nobody here.
        server = json.loads((state / "cluster.json").read_text())["server"]
        with pytest.raises(ClusterError):
            cluster.kubectl("get", "nodes", "--server", server, "--certificate-authority", str(state / "pki/ca.crt"))

        everyone = [p.pid for p in second.processes().values() if p is not None]
        assert len(everyone) == 5
        everyone += [second.hollow.pid("default", name, "main"), int(hidden.read_text())]
        assert all(runs(pid) for pid in everyone)
        assert memory_folder(mark).exists()
    finally:
        down = command("down")
    assert down.returncode == 0, down.stderr
    assert [pid for pid in everyone if runs(pid)] == []
    assert processes.marked(mark) == []
    assert not state.exists()
    assert not memory_folder(mark).exists()
    assert command("down").returncode == 0
    assert cluster.running()


def guards(state: Path) -> list[int]:
    """Process ids of those that will take the cluster in ``state`` down; there is one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"guard" in words and str(state).encode() in words:
                found.append(int(folder.name))
    assert found
    return found


def test_a_cluster_whose_owner_is_killed_is_taken_down(tmp_path: Path) -> None:
    state = tmp_path / "owned"
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from e2e.cluster.local import LocalCluster\n"
        "with LocalCluster(Path(sys.argv[1]), nodes=0, bare=True):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(100000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(state)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        mark = json.loads((state / "cluster.json").read_text())["mark"]
        assert processes.marked(mark)
        # As a CI job ends: everything that names its checkout is told to end, whoever is to clean up among it.
        for guard in guards(state):
            os.kill(guard, signal.SIGTERM)
        owner.kill()
    wait_until(lambda: not state.exists(), "the state folder's end")
    assert processes.marked(mark) == []


def test_containers_die_with_the_hollow_kubelet(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "third", nodes=1, bare=True) as third:
        third.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "orphan", "namespace": "default"},
                "spec": {"containers": [container("main", SLEEP)]},
            }
        )
        third.kubectl("wait", "pod/orphan", "--for=condition=Ready", "--timeout=180s")
        pid = third.hollow.pid("default", "orphan", "main")
        kubelet = third.processes()["hollow-kubelet"]
        assert kubelet is not None
        os.kill(kubelet.pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid), "the container's end")
        assert not third.running()
