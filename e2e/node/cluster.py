"""One real node below one state folder: control plane, containerd, kubelet, kube-proxy, CoreDNS. Pods really run.

Everything runs in a network namespace of its own, with one link to this machine: ports, addresses and packet filter
rules meet nobody else's and vanish with it. Invariant: ``down`` removes everything, whatever of it still runs, whoever
was killed before; only containerd's image store stays, in the cache folder, so that images need no second import.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import httpx

from e2e.cluster import pki, processes
from e2e.cluster.controlplane import ClusterError, ControlPlane, Site
from e2e.cluster.guard import Guard
from e2e.cluster.local import ROOT, LocalCluster, Record
from e2e.cluster.processes import CLUSTER_MARK, Process
from e2e.cluster.programs import NODE_PROGRAMS, cache_root, ensure_programs
from e2e.cluster.waiting import wait_until
from e2e.node import host, settings
from e2e.node.host import Network
from e2e.node.images import ensure_pause
from e2e.node.settings import NODE_NAME, Places

DEFAULT_STATE = ROOT / ".node"

_KUBELET, _PROXY, _DNS = "kubelet", "kube-proxy", "coredns"
_IDENTITIES = {
    _KUBELET: (f"system:node:{NODE_NAME}", "system:nodes"),
    _PROXY: ("system:kube-proxy", None),
    _DNS: ("rlfleet:coredns", None),
    "apiserver-kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
}
_STOP_SECONDS = 15.0
_START_SECONDS = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeRecord(Record):
    """What ``cluster.json`` remembers: enough to remove everything without anything else."""

    index: int = 0
    images: str = ""


class RealNode(LocalCluster):
    """A cluster of one real node. Needs root. ``install``: missing Debian packages are installed with apt-get."""

    def __init__(self, state: Path = DEFAULT_STATE, say: Say = lambda line: None, *, install: bool = False) -> None:
        super().__init__(state, 0, say, bare=True)
        self._install = install

    def __enter__(self) -> RealNode:
        self._guard = Guard(self.state, "e2e.node")
        try:
            self.up()
        except BaseException:
            self.down()
            self._guard.release()
            raise
        return self

    def up(self) -> None:
        """Starts everything; returns when the node is Ready and names are answered. ClusterError says what is wrong."""
        host.require({**host.NODE_PACKAGES, **host.COMPILER}, self._say, install=self._install)
        self._programs = {**ensure_programs(say=self._say), **ensure_programs(say=self._say, catalog=NODE_PROGRAMS)}
        if self._record() is not None and self.running():
            self._say(f"the node in {self.state} is already running")
            return
        if self._record() is not None:
            self._say(f"removing a stopped node from {self.state}")
            self.down()
        if self.state.exists() and any(self.state.iterdir()):
            raise ClusterError(f"{self.state} is not empty and holds no node: choose another folder")
        self.state.mkdir(parents=True, exist_ok=True, mode=0o755)
        started = time.monotonic()
        mark, network, store = uuid.uuid4().hex, Network.claim(), self._store()
        record = NodeRecord(mark, "", 0, network.index, str(store))
        self._remember(record)
        network.up()
        host.make_cgroup(self._places(record).cgroup)
        plane = self._plane(record)
        plane.start(self._say)
        self._remember(NodeRecord(mark, plane.server, 0, network.index, str(store)))
        self._start_containerd(record)
        self._start_node(record)
        for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
            self.kubectl("wait", "--for=create", thing, "--namespace=default", "--timeout=60s")
        self._say(f"node {NODE_NAME} Ready, {time.monotonic() - started:.1f} s in all")

    def down(self) -> None:
        """Stops every process and removes every trace but the image store. Nothing to do is a success."""
        record = self._record()
        if record is None:
            return
        places = self._places(record)
        self._stop(places, _PROXY, _KUBELET)
        host.kill_cgroup(places.cgroup)
        self._stop(places, _DNS)
        ControlPlane(self.state, {}, record.mark).stop()
        self._stop(places, "containerd")
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        processes.sweep(record.mark)
        host.kill_cgroup(places.cgroup)
        host.remove_strays(self.state, places.pod_network)
        host.unmount_below(self.state, places.images, places.sockets)
        host.remove_cgroup(places.cgroup)
        places.network.down()
        shutil.rmtree(places.sockets, ignore_errors=True)
        with contextlib.suppress(OSError):
            places.sockets.parent.rmdir()  # another node's sockets keep it
        shutil.rmtree(self.state)

    def processes(self) -> dict[str, Process | None]:
        """The processes that the node should have, by name; None for one that was never started."""
        if self._record() is None:
            return {}
        names = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "containerd", _KUBELET, _PROXY]
        return {name: processes.load(self.state / "run" / f"{name}.json") for name in (*names, _DNS)}

    def reboot(self) -> None:
        """What a power cut does to a node: every container, kubelet, containerd and memory volume gone, disk kept.

        Control plane and DNS stay, as they would on another machine. Returns when the node is Ready again.
        """
        record = self._record()
        if record is None:
            raise ClusterError(f"no node in {self.state}")
        places = self._places(record)
        for name in (_PROXY, _KUBELET, "containerd"):
            process = processes.load(self.state / "run" / f"{name}.json")
            if process is not None:
                processes.kill(process)
        host.kill_cgroup(places.cgroup)
        for pid in processes.marked(record.mark):
            if host.comm(str(pid)).startswith("containerd-shim"):
                # It ends by itself when its last container has.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        host.remove_strays(self.state, places.pod_network)
        host.unmount_below(places.kubelet, self.state / "containerd", places.images)
        shutil.rmtree(self.state / "containerd" / "state", ignore_errors=True)
        self._start_containerd(record, leftovers=False)
        self._start_node(record)

    def kill_container(self, identity: str) -> None:
        """SIGKILL to the first process of a container (``containerID`` of its status), as the kernel might do it."""
        wanted = identity.removeprefix("containerd://")
        for line in self.ctr("tasks", "list").splitlines():
            name, pid, *_ = line.split()
            if name == wanted:
                os.kill(int(pid), signal.SIGKILL)
                return
        raise ClusterError(f"container {identity} does not run")

    def ctr(self, *arguments: str, timeout: float = 300.0, stdin: IO[bytes] | None = None) -> str:
        """containerd's command line, in the namespace of Kubernetes."""
        record = self._record()
        if record is None:
            raise ClusterError(f"no node in {self.state}: start one with 'make node'")
        socket = self._places(record).containerd
        return host.run(
            "ctr", "--address", str(socket), "--namespace", "k8s.io", *arguments, timeout=timeout, stdin=stdin
        )

    def helm(self, *arguments: str, timeout: float = 240.0) -> str:
        """Runs helm as admin."""
        return self._run("helm", *arguments, timeout=timeout)

    def import_image(self, write: Callable[[IO[bytes]], None], name: str, identity: str) -> None:
        """Imports the image archive that ``write`` writes, and remembers whose it is."""
        reading, writing = os.pipe()
        with open(reading, "rb") as source, ThreadPoolExecutor(1) as thread:
            done = thread.submit(self.ctr, "images", "import", "-", stdin=source, timeout=900.0)
            try:
                with open(writing, "wb") as stream:
                    write(stream)
            except BrokenPipeError:
                pass  # what ctr says about it is the better message
            done.result()
        self.ctr("images", "label", name, f"dev.rlfleet.image={identity}")

    def blobs(self) -> dict[str, int]:
        """What the node's store holds: sha256 (hex) and size. Read from its folder, as ``ctr`` rounds sizes."""
        record = self._record()
        if record is None:
            raise ClusterError(f"no node in {self.state}: start one with 'make node'")
        folder = Path(record.images) / "io.containerd.content.v1.content" / "blobs" / "sha256"
        return {path.name: path.stat().st_size for path in folder.glob("*")}

    def holds_image(self, name: str, identity: str) -> bool:
        """Whether the node's store has this very image under this name."""
        return f"dev.rlfleet.image={identity}" in self.ctr("images", "list", f"name=={name}")

    @property
    def address(self) -> str:
        """The node's address."""
        record = self._record()
        if record is None:
            raise ClusterError(f"no node in {self.state}")
        return Network(record.index).address

    # ------------------------------------------------------------------------------------------------ parts

    def _store(self) -> Path:
        """Where images lie: in the cache, unless another node on this machine uses that just now."""
        shared = cache_root() / "node" / "containerd"
        owner = shared.parent / "owner"
        if owner.exists() and owner.read_text() != str(self.state):
            process = processes.load(Path(owner.read_text()) / "run" / "containerd.json")
            if process is not None and process.alive():
                return self.state / "containerd" / "root"
        return shared

    def _places(self, record: NodeRecord) -> Places:
        short = record.mark[:8]
        return Places(
            self.state,
            Path("/run/rlfleet") / short,
            Path(record.images),
            Network(record.index),
            f"rlfleet-{short}",
        )

    def _plane(self, record: NodeRecord) -> ControlPlane:
        network = Network(record.index)
        servers = {"kubelet-serving": (network.address, NODE_NAME)}
        site = Site(network.address, network.file, _IDENTITIES, servers)
        return ControlPlane(self.state, self._programs, record.mark, site)

    def _launch(self, record: NodeRecord, name: str, program: Path, *arguments: str) -> Process:
        return processes.start(
            name,
            [str(program), *arguments],
            log=self.state / "logs" / f"{name}.log",
            environment={
                "PATH": host.search_path(),
                "HOME": str(self.state),
                CLUSTER_MARK: record.mark,
            },
            record=self.state / "run" / f"{name}.json",
            namespace=Network(record.index).file,
        )

    def _start_containerd(self, record: NodeRecord, *, leftovers: bool = True) -> None:
        places = self._places(record)
        places.images.mkdir(parents=True, exist_ok=True)
        (places.images.parent / "owner").write_text(str(self.state))
        places.sockets.mkdir(parents=True, exist_ok=True)
        for folder in ("containerd", "cni", "addresses", "kubelet", "volume-plugins", "pod-logs"):
            (self.state / folder).mkdir(exist_ok=True)
        config = self.state / "containerd" / "config.toml"
        config.write_text(settings.containerd_config(places))
        (self.state / "cni" / "10-pods.conflist").write_text(settings.cni_config(places))
        self._run_containerd(record, config)
        if leftovers and (found := self.ctr("containers", "list", "--quiet").split()):
            # Of a node that ended without 'down'. containerd has read them already, so it is started again.
            self.ctr("containers", "remove", *found)
            self._stop(places, "containerd")
            self._run_containerd(record, config)
        ensure_pause(self)

    def _run_containerd(self, record: NodeRecord, config: Path) -> None:
        program = Path(shutil.which("containerd", path=host.search_path()) or "/usr/bin/containerd")
        process = self._launch(record, "containerd", program, "--config", str(config))

        def answers() -> bool:
            if not process.alive():
                raise ClusterError(f"containerd ended at start:\n{self._tail('containerd')}")
            try:
                self.ctr("version", timeout=10)
            except ClusterError:
                return False
            return True

        wait_until(answers, "containerd answers", _START_SECONDS)

    def _start_node(self, record: NodeRecord) -> None:
        places = self._places(record)
        (self.state / "kubelet.yaml").write_text(settings.kubelet_config(places))
        kubeconfigs = {name: self.state / "pki" / f"{name}.kubeconfig" for name in (_KUBELET, _PROXY, _DNS)}
        (self.state / "kube-proxy.yaml").write_text(settings.proxy_config(places, kubeconfigs[_PROXY]))
        (self.state / "Corefile").write_text(settings.corefile(places, kubeconfigs[_DNS]))
        began = time.time()
        kubelet = self._launch(
            record,
            _KUBELET,
            self._programs[_KUBELET],
            f"--config={self.state / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfigs[_KUBELET]}",
            f"--root-dir={places.kubelet}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={places.network.address}",
        )
        self._launch(record, _PROXY, self._programs[_PROXY], f"--config={self.state / 'kube-proxy.yaml'}")
        dns = processes.load(self.state / "run" / f"{_DNS}.json")
        if dns is None or not dns.alive():
            self.apply(*_dns_role(_IDENTITIES[_DNS][0]))
            self._launch(record, _DNS, self._programs[_DNS], f"-conf={self.state / 'Corefile'}")

        def ready() -> bool:
            if not kubelet.alive():
                raise ClusterError(f"kubelet ended at start:\n{self._tail(_KUBELET)}")
            for node in self.get("nodes")["items"]:
                for condition in node["status"].get("conditions", []):
                    if condition["type"] == "Ready" and condition["status"] == "True":
                        return _seconds(condition["lastHeartbeatTime"]) >= int(began)
            return False

        wait_until(ready, "the node is Ready", _START_SECONDS)
        wait_until(lambda: self._names_answered(places.network.address), "CoreDNS is ready", _START_SECONDS)

    def _names_answered(self, address: str) -> bool:
        process = processes.load(self.state / "run" / f"{_DNS}.json")
        if process is None or not process.alive():
            raise ClusterError(f"CoreDNS ended at start:\n{self._tail(_DNS)}")
        try:
            answer = httpx.get(f"http://{address}:{settings.DNS_READY_PORT}/ready", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    def _stop(self, places: Places, *names: str) -> None:
        for name in names:
            process = processes.load(places.state / "run" / f"{name}.json")
            if process is not None:
                processes.stop([process], grace_seconds=_STOP_SECONDS)

    def _tail(self, name: str, lines: int = 15) -> str:
        return ControlPlane(self.state, {}, "").tail(name, lines)

    def _record(self) -> NodeRecord | None:
        try:
            return NodeRecord(**json.loads((self.state / "cluster.json").read_text()))
        except FileNotFoundError:
            return None

    def _remember(self, record: NodeRecord) -> None:
        pki.write_private(self.state / "cluster.json", json.dumps(asdict(record)).encode())


def _seconds(timestamp: str) -> int:
    return int(datetime.fromisoformat(timestamp).timestamp())


def _dns_role(user: str) -> list[dict[str, object]]:
    name = "rlfleet:coredns"
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    api = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    ]


__all__ = ["DEFAULT_STATE", "RealNode"]
