"""One local cluster below one state folder: the control plane, what the chart installs, and hollow nodes.

The state folder is the only record: every command finds the cluster through it, and ``down`` removes it. A folder that
holds anything else is refused, because removing it would destroy somebody's files. Two clusters share nothing but the
machine: each has its own ports, certificates, address block and mark.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from e2e.cluster import pki, processes
from e2e.cluster.audit import AuditEvent, end_of_audit, read_audit
from e2e.cluster.controlplane import HOLLOW, IDENTITIES, ClusterError, ControlPlane
from e2e.cluster.guard import Guard
from e2e.cluster.hollow.control import HollowControl
from e2e.cluster.hollow.role import hollow_role
from e2e.cluster.programs import KUBERNETES_VERSION, ensure_programs
from e2e.cluster.reading import Reader, read_path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_STATE = ROOT / ".cluster"
OPERATOR_NAMESPACE = "rlfleet-system"
OPERATOR_NAME = "rlfleet"

# Everything that the chart holds, but no process.
_QUIET = {"replicas": "0", "routerKeySecrets": "{router-keys}"}
_TOKEN_SECONDS = 365 * 24 * 3600
_HOLLOW = "hollow-kubelet"
_HOLLOW_STOP_SECONDS = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """What ``cluster.json`` remembers."""

    mark: str
    server: str
    nodes: int


class LocalCluster:
    """A cluster that can be started, attached to, and removed.

    As a context manager it starts on entry and is removed on exit, even when the process is killed in between.
    ``nodes`` is the number of hollow nodes; 0 starts the control plane alone. ``bare`` leaves out CRDs and chart
    (``install`` adds them later). ``nursery``: gates and engines are forked instead of started, for tests: a start of
    Python takes a second of CPU time and more. ``say`` receives progress lines.
    """

    def __init__(
        self,
        state: Path = DEFAULT_STATE,
        nodes: int = 4,
        say: Say = lambda line: None,
        *,
        bare: bool = False,
        nursery: bool = False,
    ) -> None:
        self.state = Path(state).resolve()
        self.nodes = nodes
        self.bare = bare
        self.nursery = nursery
        self._say = say
        self._programs: dict[str, Path] = {}
        self._reader: Reader | None = None

    def __enter__(self) -> Self:
        self._guard = Guard(self.state)
        try:
            self.up()
        except BaseException:
            self.down()
            self._guard.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        self._guard.release()

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig."""
        return self.state / "kubeconfig"

    @property
    def operator_kubeconfig(self) -> Path:
        """A kubeconfig of the operator's service account, with exactly the role that the chart installs."""
        return self.state / "operator.kubeconfig"

    @property
    def hollow(self) -> HollowControl:
        """Commands to the hollow kubelet: crash, freeze, thaw, logs."""
        return HollowControl(self.state / "hollow")

    def up(self) -> None:
        """Starts whatever of the cluster is not running yet; returns when everything is ready.

        Raises ClusterError (or BuildError) with the failing program's last lines.
        """
        self._programs = ensure_programs(say=self._say)
        if self._record() is not None and self.running():
            self._say(f"cluster in {self.state} is already running")
            self.install()
            return
        if self._record() is not None:
            self._say(f"removing a stopped cluster from {self.state}")
            self.down()
        if self.state.exists() and any(self.state.iterdir()):
            raise ClusterError(f"{self.state} is not empty and holds no cluster: choose another folder")
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = uuid.uuid4().hex
        self._write_record(Record(mark, "", self.nodes))
        plane = ControlPlane(self.state, self._programs, mark)
        plane.start(self._say)
        self._write_record(Record(mark, plane.server, self.nodes))
        # Pods are refused until their namespace has a service account, and mount the authority's certificate.
        for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
            self.kubectl("wait", "--for=create", thing, "--namespace=default", "--timeout=180s")
        if not self.bare:
            self.install()
        if self.nodes:
            self._start_hollow(plane, mark)

    def down(self) -> None:
        """Stops every process of the cluster and removes every file of it. Nothing to do is a success."""
        record = self._record()
        if record is None:
            return
        process = processes.load(self.state / "run" / f"{_HOLLOW}.json")
        if process is not None:
            # First, while the apiserver still answers: it terminates the containers, and releases its addresses.
            processes.stop([process], grace_seconds=_HOLLOW_STOP_SECONDS)
        ControlPlane(self.state, {}, record.mark).stop()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        killed = processes.sweep(record.mark)
        if killed:
            self._say(f"killed {len(killed)} processes that had lost their parent")
        shutil.rmtree(memory_folder(record.mark), ignore_errors=True)
        shutil.rmtree(self.state)

    def running(self) -> bool:
        """Whether all of the cluster's processes run."""
        return bool(self.processes()) and all(p is not None and p.alive() for p in self.processes().values())

    def processes(self) -> dict[str, processes.Process | None]:
        """The processes that the cluster should have, by name; None for one that was never started."""
        record = self._record()
        if record is None:
            return {}
        names = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
        if record.nodes:
            names.append(_HOLLOW)
        return {name: processes.load(self.state / "run" / f"{name}.json") for name in names}

    def restart(self, program: str, *, seconds: float = 180.0) -> None:
        """kill -9 to etcd, kube-apiserver, kube-controller-manager or kube-scheduler and start it again.

        Returns when the apiserver is ready. What the killed program had acknowledged is kept.
        """
        record = self._require()
        ControlPlane(self.state, {program: self.program(program)}, record.mark).restart(program)
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.kubectl("get", "--raw", "/readyz", timeout=10)
                return
            except (ClusterError, subprocess.TimeoutExpired) as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"not ready {seconds:g} s after {program} was killed: {error}") from error
            time.sleep(0.1)

    def compact(self) -> int:
        """Has etcd forget every revision before the present one, which is returned.

        Lists that are continued and watches from an older resourceVersion end with 410 from then on, except where the
        apiserver still has them in its watch cache: ``restart("kube-apiserver")`` empties that.
        """
        record = self._require()
        apiserver = ControlPlane(self.state, {}, record.mark).process("kube-apiserver")
        words = processes.command(apiserver) if apiserver is not None else []
        server = next((w.partition("=")[2] for w in words if w.startswith("--etcd-servers=")), "")
        if not server:
            raise ClusterError("kube-apiserver does not run, so etcd's address is not known")
        context = ssl.create_default_context(cafile=str(self.state / "pki" / "ca.crt"))
        client = self.state / "pki" / "apiserver-etcd-client"
        context.load_cert_chain(client.with_suffix(".crt"), client.with_suffix(".key"))
        with httpx.Client(base_url=server, verify=context, timeout=30.0, trust_env=False) as http:
            # Any key will do: the answer's header tells the revision.
            found = http.post("/v3/kv/range", json={"key": base64.b64encode(b"/").decode()})
            revision = int(found.raise_for_status().json()["header"]["revision"])
            answer = http.post("/v3/kv/compaction", json={"revision": str(revision), "physical": True})
            if answer.status_code != httpx.codes.OK:
                raise ClusterError(f"etcd does not compact to {revision}: {answer.text}")
        return revision

    def install(self) -> None:
        """Applies the CRDs and what the chart renders (again), and writes the operator's kubeconfig."""
        crds = sorted((ROOT / "crds").glob("rlfleet.dev_*.yaml"))
        if crds:
            files = [argument for path in crds for argument in ("-f", str(path))]
            self.kubectl("apply", "--server-side", "--force-conflicts", *files)
            self.kubectl("wait", "--for=condition=Established", "--timeout=180s", *files)
            self._say(f"{len(crds)} CRDs served")
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}}
        self.apply(namespace)
        self.install_chart(OPERATOR_NAME, OPERATOR_NAMESPACE, self.operator_kubeconfig)
        self._say("chart installed: service account and roles of the operator")

    def install_chart(self, release: str, namespace: str, kubeconfig: Path, **values: str) -> None:
        """Applies what the chart renders for a release, and writes a kubeconfig of its operator's service account.

        No operator is started: whoever installs runs one beside the cluster, or sets ``replicas``.
        """
        rendered = self._run(
            "helm",
            "template",
            release,
            str(ROOT / "charts/rlfleet"),
            f"--namespace={namespace}",
            f"--kube-version={KUBERNETES_VERSION}",
            "--no-hooks",
            *(f"--set={name}={value}" for name, value in {**_QUIET, "fullnameOverride": release, **values}.items()),
        )
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=rendered)
        token = self.kubectl(
            "create", "token", release, f"--namespace={namespace}", f"--duration={_TOKEN_SECONDS}s"
        ).strip()
        server = self._require().server
        pki.write_kubeconfig(kubeconfig, server, self.state / "pki" / "ca.crt", token=token, namespace=namespace)

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 240.0) -> str:
        """Runs kubectl as admin and returns its standard output; raises ClusterError with its message otherwise."""
        return self._run("kubectl", *arguments, input=input, timeout=timeout)

    def get(self, *arguments: str) -> Any:
        """What ``kubectl get ... -o json`` answers. Common forms are asked directly, at a tenth of the cost of kubectl,
        because tests poll with this."""
        path = read_path(arguments)
        if path is None:
            return json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return self.read(path)

    def read(self, path: str) -> Any:
        """One GET at the apiserver as admin; raises ClusterError for any other answer than 200."""
        return self._admin().get(path)

    def _admin(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(self._require().server, self.state / "pki")
        return self._reader

    def apply(self, *objects: dict[str, Any]) -> None:
        """Applies objects as admin, one after the other. What is refused is told in kubectl's words."""
        rest = list(objects)
        while rest and self._admin().apply(rest[0]):
            del rest[0]
        if not rest:
            return
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": rest})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)

    def audit_mark(self) -> int:
        """A position in the audit log, to be handed to ``audit``."""
        return end_of_audit(self.state / "audit.log")

    def audit(self, since: int = 0) -> list[AuditEvent]:
        """Requests that the apiserver has answered since the mark."""
        return read_audit(self.state / "audit.log", since)

    def program(self, name: str) -> Path:
        """The path of kubectl, helm or a server program, for use outside of this class."""
        self._programs = self._programs or ensure_programs(say=self._say)
        return self._programs[name]

    def _run(self, name: str, *arguments: str, input: str | None = None, timeout: float = 240.0) -> str:
        # HOME: kubectl's discovery cache must be this cluster's own, ports are reused by later ones.
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.state),
            "KUBECONFIG": str(self.kubeconfig),
        }
        done = subprocess.run(
            [str(self.program(name)), *arguments],
            input=input,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _start_hollow(self, plane: ControlPlane, mark: str) -> None:
        started = time.monotonic()
        self.apply(*hollow_role(IDENTITIES[HOLLOW][0]))
        ready = self.state / "hollow" / "ready"
        record = self.state / "run" / f"{_HOLLOW}.json"
        log = plane.log(_HOLLOW)
        process = processes.start(
            _HOLLOW,
            [
                sys.executable,
                "-m",
                "e2e.cluster.hollow",
                f"--kubeconfig={plane.kubeconfig(HOLLOW)}",
                f"--folder={self.state / 'hollow'}",
                f"--memory-folder={memory_folder(mark)}",
                f"--nodes={self.nodes}",
                f"--mark={mark}",
                *(["--nursery"] if self.nursery else []),
            ],
            log=log,
            environment={
                **plane.environment,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "operator"), str(ROOT)]),
                "PYTHONUNBUFFERED": "1",
            },
            record=record,
        )
        while not ready.exists():
            if not process.alive():
                raise ClusterError(f"hollow kubelet ended at start:\n{plane.tail(_HOLLOW)}")
            if time.monotonic() - started > 180:
                raise ClusterError(f"hollow nodes not ready within 180 s:\n{plane.tail(_HOLLOW)}")
            time.sleep(0.05)
        self.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=180s")
        self._say(f"{self.nodes} hollow nodes Ready ({time.monotonic() - started:.1f} s)")

    def _record(self) -> Record | None:
        try:
            return Record(**json.loads((self.state / "cluster.json").read_text()))
        except FileNotFoundError:
            return None

    def _require(self) -> Record:
        record = self._record()
        if record is None:
            raise ClusterError(f"no cluster in {self.state}: start one with 'make cluster'")
        return record

    def _write_record(self, record: Record) -> None:
        pki.write_private(self.state / "cluster.json", json.dumps(record.__dict__).encode())


def memory_folder(mark: str) -> Path:
    """Where memory-backed volumes of a cluster lie: a tmpfs, so that they cost memory as in a real pod."""
    return Path("/dev/shm") / f"rlfleet-{mark[:12]}"


def kubectl_hint(cluster: LocalCluster) -> Sequence[str]:
    """Lines that tell a person how to use the cluster."""
    return [
        f"export KUBECONFIG={cluster.kubeconfig}",
        f"export PATH={cluster.program('kubectl').parent}:$PATH",
        "kubectl get nodes",
    ]


__all__ = ["DEFAULT_STATE", "ROOT", "ClusterError", "LocalCluster", "Record", "kubectl_hint", "memory_folder"]
