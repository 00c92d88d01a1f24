"""What a real node takes of the machine, and gives back: packages, a network namespace, control groups, mounts.

Invariant: everything that a node leaves outside of its own folders can be told from other people's by a name that this
node chose (namespace, control group, CNI network) or by a path below its folders, so it can be removed after any crash
without touching what is not ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2e.cluster.controlplane import ClusterError

Say = Callable[[str], None]

#: Program -> Debian package that brings it.
NODE_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "ctr": "containerd",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
#: What the base image of the node's pods carries cannot be had without these.
COMPILER = {"gcc": "gcc", "gencat": "libc6-dev"}  # gcc only recommends the headers; gencat comes with them

_CGROUPS = Path("/sys/fs/cgroup")
_NETNS = Path("/run/netns")
_CNI_CACHE = Path("/var/lib/cni/results")
#: The one folder that a kubelet cannot be told to put elsewhere.
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
#: 198.18.0.0/15 is set aside for benchmarks of networks: nobody routes it. Sixty-four nodes at once on one machine.
_INDEXES = range(64)


def missing(packages: dict[str, str]) -> list[str]:
    """Debian packages whose programs this machine lacks."""
    lacking = {package for program, package in packages.items() if shutil.which(program, path=search_path()) is None}
    return sorted(lacking)


def require(packages: dict[str, str], say: Say, *, install: bool) -> None:
    """Checks for root and programs; installs what is missing where ``install`` says so. ClusterError names the rest."""
    if os.geteuid() != 0:
        raise ClusterError(
            "a real node needs root: containers, a network namespace, mounts (use 'make cluster' without)"
        )
    lacking = missing(packages)
    if not lacking:
        return
    command = f"apt-get install --no-install-recommends {' '.join(lacking)}"
    if not install or shutil.which("apt-get") is None:
        raise ClusterError(f"missing on this machine: {', '.join(lacking)}. On Debian: {command} (or INSTALL=1)")
    say(f"installing with apt-get: {', '.join(lacking)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "--yes", "-qq", "--no-install-recommends", *lacking]):
        done = subprocess.run(["apt-get", *arguments], capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise ClusterError(f"apt-get {arguments[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    if still := missing(packages):
        raise ClusterError(f"apt-get installed {', '.join(lacking)}, but programs are missing: {', '.join(still)}")


def run(*command: str, inside: Path | None = None, timeout: float = 60.0, stdin: IO[bytes] | None = None) -> str:
    """Runs a program (``inside`` a network namespace) and returns its output; ClusterError with its message."""
    words = [*(["nsenter", f"--net={inside}", "--"] if inside else []), *command]
    done = subprocess.run(
        words,
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PATH": search_path()},
    )
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def search_path() -> str:
    """PATH with the folders of system programs, which an ordinary shell may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


# --------------------------------------------------------------------------------------------- network


@dataclass(frozen=True)
class Network:
    """A network namespace with one link to the machine. Addresses follow from ``index``; nothing outside is routed."""

    index: int

    @property
    def name(self) -> str:
        """The namespace's name."""
        return f"rlfleet-node-{self.index}"

    @property
    def file(self) -> Path:
        """The namespace's file, to enter it."""
        return _NETNS / self.name

    @property
    def address(self) -> str:
        """The node's address; the machine's end of the link is ``gateway``."""
        return f"198.18.{self.index}.2"

    @property
    def gateway(self) -> str:
        """The machine's address on the link."""
        return f"198.18.{self.index}.1"

    @property
    def pods(self) -> str:
        """The range of pod addresses."""
        return f"198.19.{self.index}.0/24"

    @property
    def link(self) -> str:
        """The machine's end of the link."""
        return f"rlfleet{self.index}"

    @classmethod
    def claim(cls) -> Network:
        """Makes the namespace under the first free index: the kernel lets only one have a name."""
        for index in _INDEXES:
            network = cls(index)
            try:
                run("ip", "netns", "add", network.name)
            except ClusterError as error:
                if network.file.exists():
                    continue
                raise ClusterError(f"network namespaces cannot be made here: {error}") from error
            return network
        raise ClusterError(f"{len(_INDEXES)} nodes run already; 'ip netns list' shows them")

    def up(self) -> None:
        """Links the namespace with the machine. The machine can reach the pods too, which tests use."""
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "addr", "add", f"{self.gateway}/30", "dev", self.link)
        run("ip", "link", "set", self.link, "up")
        for words in (
            ("addr", "add", f"{self.address}/30", "dev", "eth0"),
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.gateway),
        ):
            run("ip", *words, inside=self.file)
        run("sysctl", "-qw", "net.ipv4.ip_forward=1", inside=self.file)
        run("ip", "route", "add", self.pods, "via", self.address)

    def down(self) -> None:
        """Removes the namespace; the link, the routes and every packet filter rule of the node go with it."""
        if self.file.exists():
            run("ip", "netns", "delete", self.name)
        # The namespace lives as long as a process is in it; its end of the link goes at once, if it has not gone yet.
        link = Path(f"/sys/class/net/{self.link}")
        try:
            if link.exists():
                run("ip", "link", "delete", self.link)
        except ClusterError:
            if link.exists():
                raise


# --------------------------------------------------------------------------------------------- control groups


def make_cgroup(name: str) -> None:
    """Makes the control group ``/name`` that all pods live in, in every hierarchy of the machine."""
    for hierarchy in _hierarchies():
        folder = hierarchy / name
        folder.mkdir(exist_ok=True)
        for knob in ("cpuset.cpus", "cpuset.mems"):
            # A new group of the first version has none, and takes no process then. In the second one none means "as
            # above", and the group at the top has no such file.
            above = hierarchy / knob
            if above.exists() and (folder / knob).exists() and not (folder / knob).read_text().strip():
                (folder / knob).write_text(above.read_text())


def kill_cgroup(name: str, *, seconds: float = 20.0) -> None:
    """SIGKILL to everything in the group and below; returns when all of it is gone."""
    deadline = time.monotonic() + seconds
    while pids := _members(name):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            raise ClusterError(f"processes of control group /{name} do not end: {sorted(pids)}")
        time.sleep(0.05)


def remove_cgroup(name: str) -> None:
    """Removes the emptied group and everything below it."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            _rmdir(Path(folder))


def _rmdir(folder: Path) -> None:
    # Its last process may still be on its way out of the kernel.
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise ClusterError(f"control group {folder} cannot be removed")


def _members(name: str) -> set[int]:
    pids: set[int] = set()
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name):
            try:
                pids |= {int(line) for line in (Path(folder) / "cgroup.procs").read_text().split()}
            except OSError:
                continue  # removed meanwhile
    return pids


def _hierarchies() -> Sequence[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [p for p in _CGROUPS.iterdir() if p.is_dir() and not p.is_symlink()]


def try_out() -> None:
    """Makes and removes one thing of each kind that a container may be refused. ClusterError says which."""
    network = Network.claim()
    try:
        network.up()
    except ClusterError as error:
        raise ClusterError(f"links between network namespaces cannot be made here: {error}") from error
    finally:
        network.down()
    name = f"rlfleet-try-{os.getpid()}"
    try:
        make_cgroup(name)
        remove_cgroup(name)
    except OSError as error:
        raise ClusterError(f"control groups cannot be made here: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        run("mount", "-t", "tmpfs", "tmpfs", folder)
        run("umount", folder)


# --------------------------------------------------------------------------------------------- mounts and files


def comm(pid: str) -> str:
    """The name of a process's program; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def unmount_below(*folders: Path) -> None:
    """Unmounts everything that is mounted at or below these folders, innermost first."""
    for _ in range(5):
        found = [p for p in _mounts() if any(p == f or f in p.parents for f in folders)]
        if not found:
            return
        for path in sorted(found, key=lambda p: len(p.parts), reverse=True):
            # Lazily: a process of another namespace may hold it, and this one has to go all the same.
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)
    raise ClusterError(f"still mounted: {', '.join(map(str, found))}")


def _mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def listens(path: Path) -> bool:
    """A process accepts connections at this unix socket; False for what a process left behind, and for nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def remove_strays(state: Path, network: str) -> None:
    """Removes what shims, kubelet and CNI plugins put at fixed places: sockets, links, caches, empty folders."""
    for task in state.glob("containerd/state/io.containerd.runtime.v2.task/*/*"):
        try:
            address = (task / "address").read_text().strip().removeprefix("unix://")
        except FileNotFoundError:
            continue
        if address.startswith("/run/containerd/s/"):
            Path(address).unlink(missing_ok=True)
    for cached in _CNI_CACHE.glob(f"{network}-*"):
        # The same pod's loopback is in a network that bears no name of ours.
        pod = cached.name.removeprefix(f"{network}-").partition("-")[0]
        for entry in _CNI_CACHE.glob(f"*-{pod}-*"):
            entry.unlink(missing_ok=True)
    for link in Path("/var/log/containers").glob("*.log"):
        if link.is_symlink() and os.readlink(link).startswith(f"{state}/"):
            link.unlink()
    # Another kubelet of this machine listens there: then they are its own.
    if not listens(_DEVICE_PLUGINS / "kubelet.sock"):
        for name in ("kubelet_internal_checkpoint", "kubelet.sock"):
            (_DEVICE_PLUGINS / name).unlink(missing_ok=True)
    for path in (_DEVICE_PLUGINS, *_DEVICE_PLUGINS.parents[:1], Path("/var/log/containers")):
        try:
            path.rmdir()  # kubelet made it; somebody else's is not empty
        except OSError:
            pass
