"""What round scenarios need: an operator process, a pipeline with engines and a trainer, and eyes.

Everything is real: the operator runs as its own process under its own service account, engines, gates and trainer are
pods of the hollow nodes. Waiting is always for a condition, with a deadline that only ends a broken test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from e2e.cluster.local import LocalCluster
from e2e.cluster.nursery import Nursery
from e2e.scenarios.ports import CONTROL_PORT
from rlfleet.api.naming import round_name

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
_PROGRAM = "rlfleet.app.cli"
TERMINAL = ("Succeeded", "Failed", "Superseded", "Cancelled", "Expired")


def wait_until(look: Callable[[], T | None], what: str, seconds: float = 240.0, *, every: float = 0.1) -> T:
    """Call ``look`` until it gives something true; AssertionError with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(every)


def http(
    method: str, url: str, body: Any = None, *, timeout: float = 60.0, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """One JSON request; (status, parsed body)."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            raw = answer.read()
            return answer.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()
    except urllib.error.HTTPError as e:
        raw = e.read()
        return e.code, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Process(Protocol):
    """What tests do with an operator's process."""

    @property
    def pid(self) -> int:
        """Its pid."""

    @property
    def returncode(self) -> int | None:
        """Its exit code as ``poll`` or ``wait`` found it last."""

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, or raise TimeoutExpired."""

    def kill(self) -> None:
        """SIGKILL."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""


def operators() -> Nursery:
    """A nursery of operators; the command line imports the operator only when it runs it."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    return Nursery([_PROGRAM, "e2e.scenarios.imported"], environment)


class Operator:
    """One operator process."""

    #: Forks it, where that makes no difference; None: it is started.
    nursery: Nursery | None = None

    def __init__(self, cluster: LocalCluster, folder: Path, **env: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.env = env
        self.port = free_port()
        self.web = free_port()
        self.process: Process | None = None
        self.log = folder / "operator.log"

    def start(self, *, wait: bool = True) -> None:
        """Start it and wait until it is ready; without ``wait`` it may as well die at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}",
            "RLFLEET_KUBECONFIG": str(self.cluster.operator_kubeconfig),
            "RLFLEET_HEALTH_BIND": f"127.0.0.1:{self.port}",
            "RLFLEET_WEB_BIND": f"127.0.0.1:{self.web}",
            "RLFLEET_POLL_SECONDS": "1",
            # These tests kill operators and start them again, one at a time or two at once on purpose; with an election
            # each start would wait for the dead one's Lease. Tests of leadership turn it on.
            "RLFLEET_LEADER_ELECT": "false",
            **self.env,
        }
        with self.log.open("ab") as out:
            self.process = self.spawn(["operator"], env, out)
        if wait:
            wait_until(self.ready, f"the operator to be ready; log:\n{self.tail()}", 240)

    def spawn(self, arguments: list[str], env: dict[str, str], out: IO[bytes]) -> Process:
        """A process that runs our command line."""
        if self.nursery is not None and self.nursery.bears(_PROGRAM, env):
            return self.nursery.fork(_PROGRAM, arguments, env, str(self.folder), str(self.log))
        # It ends with the thread that starts it: tests that were cut short left operators behind, which polled on.
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", _PROGRAM, *arguments],
            env=env,
            stdout=out,
            stderr=out,
            cwd=self.folder,
            start_new_session=True,
        )

    def ready(self) -> bool:
        """Its /readyz answers 200."""
        assert self.process is not None
        assert self.process.poll() is None, f"the operator ended ({self.process.returncode}):\n{self.tail()}"
        with contextlib.suppress(OSError):
            return http("GET", f"http://127.0.0.1:{self.port}/readyz", timeout=2)[0] == 200
        return False

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL, as when its node dies."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


class Fleet:
    """One pipeline ``p`` with a pool ``e`` and a trainer pod ``trainer`` in one namespace."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.incarnation = ""

    # ------------------------------------------------------------------------------------------ making

    def pipeline(self, **spec: Any) -> None:
        """Create or change the pipeline; deadlines are short unless the test says otherwise."""
        base: dict[str, Any] = {
            "weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}},
            "transport": {"mode": "CPUSerialize", "backend": "gloo"},
            "sync": {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 20}},
        }
        self.apply("RLPipeline", "p", {**base, **spec})

    def pool(
        self,
        replicas: int,
        *,
        backend: str = "numpy",
        name: str = "e",
        engine_args: tuple[str, ...] = (),
        checkpoints: Path | None = None,
        **spec: Any,
    ) -> None:
        """Create or change a pool of reference engines; ``checkpoints``: a folder that they mount at /checkpoints."""
        template: dict[str, Any] = {
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "engine",
                        "image": "rlfleet/reference-engine",
                        "command": [
                            "python", "-m", "e2e.sim.engine", "--host", "$(RLFLEET_POD_IP)", "--port", "30000",
                            "--backend", backend, "--no-health-generation", *engine_args,
                        ],
                    }
                ],
            }
        }  # fmt: skip
        gate: dict[str, Any] = {"image": "rlfleet/gate", "stagingMiB": 1024}
        if checkpoints is not None:
            template["spec"]["volumes"] = [{"name": "checkpoints", "hostPath": {"path": str(checkpoints)}}]
            mount = {"name": "checkpoints", "mountPath": "/checkpoints"}
            template["spec"]["containers"][0]["volumeMounts"] = [mount]
            gate["checkpointVolume"] = "checkpoints"
        base: dict[str, Any] = {
            "pipeline": "p",
            "replicas": replicas,
            "engine": {"type": "SGLang", "gpusPerEngine": 1},
            "source": {"template": template},
            "gate": gate,
        }
        self.apply("EnginePool", name, {**base, **spec})

    def trainer(self, *, gpus: tuple[str, list[str]] | None = None, **env: str) -> None:
        """Create the trainer pod, with the operator's public keys, and wait until its sender can be ordered.

        ``gpus``: node and UUIDs that its container is given, as a device plugin would; then it reads their memory, too.
        """
        if gpus is not None:
            env = {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus[1]), "RLFLEET_NODE_NAME": gpus[0], **env}
        keys = wait_until(lambda: self.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")
        text = json.dumps({k["kid"]: k["key"] for k in keys})
        node = gpus[0] if gpus is not None else None
        self.cluster.apply(trainer_pod(self.namespace, {"RLFLEET_PUBLIC_KEYS": text, **env}, node))
        self.wait_trainer()

    def wait_trainer(self) -> None:
        """Wait until the trainer's control port answers."""
        wait_until(self._trainer_answers, "the trainer to answer", 240)

    def _trainer_answers(self) -> bool:
        with contextlib.suppress(OSError, KeyError):
            return http("POST", self.trainer_url(), {"version": -1, "change": "empty"}, timeout=3)[0] == 409
        return False

    def trainer_url(self) -> str:
        """Where publishes are ordered."""
        return f"http://{self.pod('trainer')['status']['podIP']}:{CONTROL_PORT}/publish"

    def apply(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        """Apply one object of ours."""
        self.cluster.apply(
            {
                "apiVersion": "rlfleet.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": spec,
            }
        )

    def publish(self, version: int, seed: int | None = None, **order: Any) -> str:
        """Publish weights at the sender; their digest."""
        code, answer = http(
            "POST",
            self.trainer_url(),
            {"version": version, "seed": version + 1000 if seed is None else seed, **order},
            timeout=60,
        )
        assert code == 200, answer
        self.incarnation = answer["incarnation"]
        return str(answer["digest"])

    def order(self, version: int, attempt: int = 1, **spec: Any) -> str:
        """Create a SyncRound as the SDK does; its name."""
        uid = self.get("rlpipeline", "p")["metadata"]["uid"]
        name = round_name("p", uid, self.incarnation, version, attempt)
        self.cluster.apply(
            {
                "apiVersion": "rlfleet.dev/v1alpha1",
                "kind": "SyncRound",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": {"rlfleet.dev/pipeline": "p"},
                    "ownerReferences": [
                        {"apiVersion": "rlfleet.dev/v1alpha1", "kind": "RLPipeline", "name": "p", "uid": uid}
                    ],
                },
                "spec": {
                    "pipeline": "p",
                    "version": version,
                    "senderIncarnation": self.incarnation,
                    "attempt": attempt,
                    **spec,
                },
            }
        )
        return name

    def sync(self, version: int, seed: int | None = None, *, attempt: int = 1, **spec: Any) -> dict[str, Any]:
        """Publish, order a round, and wait for its end; the round."""
        self.publish(version, seed)
        return self.ended(self.order(version, attempt, **spec))

    # ------------------------------------------------------------------------------------------ seeing

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object, live."""
        found: dict[str, Any] = self.cluster.get(kind, name, "-n", self.namespace)
        return found

    def pod(self, name: str) -> dict[str, Any]:
        """One pod, live."""
        return self.get("pod", name)

    def engines(self) -> list[dict[str, Any]]:
        """Engine pods, by name."""
        listed = self.cluster.get("pods", "-n", self.namespace, "-l", "rlfleet.dev/pipeline=p,rlfleet.dev/pool")
        return sorted(listed["items"], key=lambda p: str(p["metadata"]["name"]))

    def phase(self, name: str) -> str:
        """A round's phase."""
        return str((self.get("syncround", name).get("status") or {}).get("phase") or "")

    def ended(self, name: str, seconds: float = 240.0) -> dict[str, Any]:
        """Wait for a round's end and for its slot to be free; the round."""

        def look() -> dict[str, Any] | None:
            found = self.get("syncround", name)
            if (found.get("status") or {}).get("phase") not in TERMINAL:
                return None
            return None if self.status("rlpipeline", "p").get("activeOperation") else found

        return wait_until(look, f"round {name} to end", seconds)

    def status(self, kind: str, name: str) -> dict[str, Any]:
        """Status of an object."""
        return dict(self.get(kind, name).get("status") or {})

    def ready_engines(self, count: int, seconds: float = 240.0) -> list[dict[str, Any]]:
        """Wait until exactly ``count`` engine pods exist and are Ready."""

        def look() -> list[dict[str, Any]] | None:
            pods = [p for p in self.engines() if "deletionTimestamp" not in p["metadata"]]
            ready = [p for p in pods if condition(p, "Ready") == "True"]
            return pods if len(pods) == len(ready) == count else None

        return wait_until(look, f"{count} ready engines", seconds, every=0.3)

    def replaced(self, old: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait until as many engines are ready as before, none of them an old one; the new ones."""
        gone = {p["metadata"]["uid"] for p in old}

        def look() -> list[dict[str, Any]] | None:
            pods = self.ready_engines(len(old))
            return None if gone & {p["metadata"]["uid"] for p in pods} else pods

        return wait_until(look, "all engines to be replaced")

    def checksum(self, pod: dict[str, Any]) -> str:
        """The engine's own checksum of its parameters, asked of the engine itself."""
        code, answer = http("POST", engine_url(pod) + "/weights_checker", {"action": "checksum"})
        assert code == 200, answer
        return str(answer["per_engine_checksum"])

    def label(self, pod: dict[str, Any]) -> str:
        """The weight version label, asked of the engine itself."""
        return str(http("GET", engine_url(pod) + "/model_info")[1]["weight_version"])

    def paused(self, pod: dict[str, Any]) -> bool:
        """The engine does not take requests up now (its /ready says so)."""
        return http("GET", engine_url(pod) + "/ready")[0] == 503

    def serving(self, pod: dict[str, Any], version: int, seconds: float = 240.0) -> None:
        """Wait until the engine is open with this version; with which others it was open until then is refused."""

        def look() -> bool:
            # In this order: labels only move on, so what is read last was not yet there when the engine was open.
            if self.paused(pod):
                return False
            assert self.label(pod) == str(version), f"{pod['metadata']['name']} is open with {self.label(pod)}"
            return True

        wait_until(look, f"{pod['metadata']['name']} to serve version {version}", seconds)

    def fault(self, pod: dict[str, Any], call: str, **how: Any) -> None:
        """Script one fault of an engine."""
        code, answer = http("POST", engine_url(pod) + "/_sim/faults", {call: how})
        assert code == 200, answer

    def heal(self, pod: dict[str, Any]) -> None:
        """Take an engine's scripted faults back."""
        code, answer = http("POST", engine_url(pod) + "/_sim/faults", {})
        assert code == 200, answer


def engine_url(pod: dict[str, Any]) -> str:
    """Where the pod's engine listens."""
    return f"http://{pod['status']['podIP']}:30000"


def condition(obj: dict[str, Any], kind: str) -> str:
    """Status of one condition, or an empty string."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "")


def await_kind(cluster: LocalCluster, crd: str) -> None:
    """Wait until a CustomResourceDefinition is served. ``kubectl wait`` gives up on one that has no conditions yet."""
    wait_until(lambda: condition(cluster.get("crd", crd), "Established") == "True", f"{crd} to be served")


def trainer_pod(namespace: str, env: dict[str, str], node: str | None = None) -> dict[str, Any]:
    """The trainer's pod; ``node``: where it runs, None: the scheduler decides."""
    fields = {"RLFLEET_POD_IP": "status.podIP", "RLFLEET_POD_UID": "metadata.uid"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trainer", "namespace": namespace, "labels": {"app": "trainer"}},
        "spec": {
            **({"nodeName": node} if node else {}),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "trainer",
                    "image": "rlfleet/trainer",
                    "command": ["python", "-m", "e2e.scenarios.publisher"],
                    "env": [
                        *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()),
                        *({"name": k, "value": v} for k, v in env.items()),
                    ],
                }
            ],
        },
    }
