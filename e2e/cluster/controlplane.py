"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler, one credential per identity.

Everything listens on loopback; a real node (e2e.node) has a network namespace and an address that its pods reach.

Every connection is TLS against the cluster's own authority, etcd's included: another user of the machine can reach a
loopback port, but gets no answer without a certificate. Ports are free ones below the ephemeral range, so no outgoing
connection can take them between the choice and the bind; the choice is made under a machine-wide lock, so that two
clusters that start at once do not choose the same.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from e2e.cluster import pki, processes
from e2e.cluster.processes import CLUSTER_MARK, Process

START_SECONDS = 240.0
_STOP_SECONDS = 10.0
_PORTS = range(20000, 29000)
_SERVICE_RANGE = "10.0.0.0/24"
_FIRST_SERVICE_ADDRESS = "10.0.0.1"
# Both the controller manager and the scheduler throttle themselves; with the defaults 1,000 pods take 50 s, not 5.
_CLIENT_RATE = ("--kube-api-qps=300", "--kube-api-burst=500")

_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Reads and leases of the control plane's own parts would be most of the file and tell a test nothing.
        {
            "level": "None",
            "users": ["system:apiserver", "system:kube-scheduler", "system:kube-controller-manager"],
            "verbs": ["get", "list", "watch"],
        },
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"], "verbs": ["get", "list", "watch"]},
        {"level": "None", "nonResourceURLs": ["/healthz*", "/readyz*", "/livez*", "/openapi*", "/api*", "/version"]},
        {"level": "Metadata"},
    ],
}

ADMIN = "admin"
HOLLOW = "hollow-kubelet"
# Name of the credential -> (user, group).
IDENTITIES: dict[str, tuple[str, str | None]] = {
    ADMIN: ("admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", None),
    "kube-scheduler": ("system:kube-scheduler", None),
    HOLLOW: ("rlfleet:hollow-kubelet", None),
    "apiserver-etcd-client": ("apiserver-etcd-client", None),
}


class ClusterError(Exception):
    """The cluster could not be started or reached; the message carries the failing program's last lines."""


@dataclass(frozen=True)
class Ports:
    """The loopback ports of one cluster."""

    etcd: int
    etcd_peer: int
    apiserver: int
    controller_manager: int
    scheduler: int


@dataclass(frozen=True)
class Site:
    """Where the control plane runs, and who else gets a credential of it.

    ``address`` is the apiserver's; one that is not loopback becomes the endpoint of the kubernetes Service, and the
    apiserver gets a client certificate for kubelets. ``namespace`` is the file of the network namespace that every
    process enters, None for the machine's own. ``identities``: name of the credential -> (user, group). ``servers``:
    name of a serving certificate -> the addresses that it is good for.
    """

    address: str = "127.0.0.1"
    namespace: Path | None = None
    identities: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    servers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def loopback(self) -> bool:
        """Whether nobody but this machine's processes reaches the apiserver."""
        return self.address.startswith("127.")


class ControlPlane:
    """The four processes of one cluster below a state folder."""

    def __init__(self, state: Path, programs: Mapping[str, Path], mark: str, site: Site = Site()) -> None:
        self._state = state
        self._site = site
        self._programs = programs
        self._pki = state / "pki"
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(state),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            CLUSTER_MARK: mark,
            # At the default of 100 a tenth of the apiserver goes into collections; so 300 MB more instead.
            "GOGC": "300",
        }
        self.server = ""

    def kubeconfig(self, identity: str) -> Path:
        """The kubeconfig of one of the control plane's own identities."""
        return self._state / "kubeconfig" if identity == ADMIN else self._pki / f"{identity}.kubeconfig"

    def start(self, say: Callable[[str], None]) -> None:
        """Issues the certificates, starts everything, returns when all four report healthy."""
        started = time.monotonic()
        with _start_lock():
            ports = _free_ports()
            self.server = f"https://{self._site.address}:{ports.apiserver}"
            authority = pki.Authority(self._pki)
            serving = authority.issue(
                "serving",
                "rlfleet-local-cluster",
                addresses=tuple(
                    dict.fromkeys(
                        ("127.0.0.1", "localhost", self._site.address, "kubernetes.default.svc", _FIRST_SERVICE_ADDRESS)
                    )
                ),
            )
            tokens = pki.service_account_keys(self._pki)
            clients = {}
            for name, (user, group) in {**IDENTITIES, **self._site.identities}.items():
                clients[name] = authority.issue(name, user, group)
                if name != "apiserver-etcd-client":
                    pki.write_kubeconfig(self.kubeconfig(name), self.server, authority.certificate, pair=clients[name])
            for name, addresses in self._site.servers.items():
                authority.issue(name, name, addresses=addresses)
            self._start_etcd(ports, authority.certificate, serving)
            self._start_apiserver(ports, authority.certificate, serving, tokens, clients["apiserver-etcd-client"])
            self._await("kube-apiserver", ports.apiserver, "/readyz", client=clients[ADMIN])
        say(f"kube-apiserver ready at {self.server} ({time.monotonic() - started:.1f} s)")
        self._start_controllers(ports, authority.certificate, serving, tokens)
        self._await("kube-controller-manager", ports.controller_manager, "/healthz")
        self._await("kube-scheduler", ports.scheduler, "/healthz")
        say(f"controller manager and scheduler ready ({time.monotonic() - started:.1f} s)")

    def stop(self) -> None:
        """Stops the processes that are recorded below the state folder, clients before their servers."""
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            process = self.process(name)
            if process is not None:
                processes.stop([process], grace_seconds=_STOP_SECONDS)

    def restart(self, name: str) -> None:
        """SIGKILL to a program, and the same command again. Whoever needs it finds it at the same port."""
        process = self.process(name)
        command = processes.command(process) if process is not None else []
        if process is None or not command:
            raise ClusterError(f"{name} does not run, so it can not be restarted")
        processes.kill(process)
        self.run(name, *command[1:])

    def process(self, name: str) -> Process | None:
        """The recorded process of a program, running or not."""
        return processes.load(self._state / "run" / f"{name}.json")

    def run(self, name: str, *arguments: str) -> None:
        """Starts one of the programs detached, with its own log and record."""
        processes.start(
            name,
            [str(self._programs[name]), *arguments],
            log=self.log(name),
            environment=self.environment,
            record=self._state / "run" / f"{name}.json",
            namespace=self._site.namespace,
        )

    def log(self, name: str) -> Path:
        """The log file of a program."""
        return self._state / "logs" / f"{name}.log"

    def _start_etcd(self, ports: Ports, authority: Path, serving: pki.KeyPair) -> None:
        client, peer = f"https://127.0.0.1:{ports.etcd}", f"https://127.0.0.1:{ports.etcd_peer}"
        self.run(
            "etcd",
            f"--data-dir={self._state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--cert-file={serving.certificate}",
            f"--key-file={serving.key}",
            "--client-cert-auth",
            f"--trusted-ca-file={authority}",
            f"--peer-cert-file={serving.certificate}",
            f"--peer-key-file={serving.key}",
            "--peer-client-cert-auth",
            f"--peer-trusted-ca-file={authority}",
            # The data dies with the cluster. A killed etcd still finds it (page cache); only a power cut would not.
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _start_apiserver(
        self, ports: Ports, authority: Path, serving: pki.KeyPair, tokens: pki.KeyPair, etcd: pki.KeyPair
    ) -> None:
        policy = self._state / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(_AUDIT_POLICY))
        self.run(
            "kube-apiserver",
            f"--etcd-servers=https://127.0.0.1:{ports.etcd}",
            f"--etcd-cafile={authority}",
            f"--etcd-certfile={etcd.certificate}",
            f"--etcd-keyfile={etcd.key}",
            f"--bind-address={self._site.address}",
            f"--advertise-address={self._site.address}",
            *self._reach(),
            f"--secure-port={ports.apiserver}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={authority}",
            "--anonymous-auth=false",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--allow-privileged=true",
            f"--service-cluster-ip-range={_SERVICE_RANGE}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={tokens.certificate}",
            f"--service-account-signing-key-file={tokens.key}",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self._state / 'audit.log'}",
            # One file: a rotation in the middle of a test would hide writes from it.
            "--audit-log-maxsize=100000",
        )

    def _reach(self) -> tuple[str, ...]:
        if self._site.loopback:
            # A loopback address is refused as an endpoint of the kubernetes Service.
            return ("--endpoint-reconciler-type=none",)
        # What kubectl logs, exec and port-forward travel through.
        return (
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={self._pki / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={self._pki / 'apiserver-kubelet-client.key'}",
            f"--kubelet-certificate-authority={self._pki / 'ca.crt'}",
        )

    def _start_controllers(self, ports: Ports, authority: Path, serving: pki.KeyPair, tokens: pki.KeyPair) -> None:
        for name, port in (("kube-controller-manager", ports.controller_manager), ("kube-scheduler", ports.scheduler)):
            config = self.kubeconfig(name)
            extra: tuple[str, ...] = ()
            if name == "kube-controller-manager":
                extra = (
                    "--use-service-account-credentials=true",
                    f"--service-account-private-key-file={tokens.key}",
                    f"--root-ca-file={authority}",
                )
            self.run(
                name,
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                f"--bind-address={self._site.address}",
                f"--secure-port={port}",
                f"--tls-cert-file={serving.certificate}",
                f"--tls-private-key-file={serving.key}",
                "--leader-elect=false",
                *_CLIENT_RATE,
                *extra,
            )

    def _await(self, name: str, port: int, path: str, client: pki.KeyPair | None = None) -> None:
        context = ssl.create_default_context(cafile=str(self._pki / "ca.crt"))
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        deadline = time.monotonic() + START_SECONDS
        problem = "no answer"
        with httpx.Client(verify=context, timeout=5.0, trust_env=False) as http:
            while time.monotonic() < deadline:
                process = self.process(name)
                if process is None or not process.alive():
                    raise ClusterError(f"{name} ended at start:\n{self.tail(name)}")
                try:
                    answer = http.get(f"https://{self._site.address}:{port}{path}")
                    if answer.status_code == httpx.codes.OK:
                        return
                    problem = f"{answer.status_code} {answer.text[:500]}"
                except httpx.TransportError as error:
                    problem = str(error)
                time.sleep(0.1)
        raise ClusterError(f"{name} not ready within {START_SECONDS:.0f} s ({problem}):\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines of a program's log, for error messages."""
        try:
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"


def _free_ports() -> Ports:
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == 5:
            return Ports(*found)
    raise ClusterError(f"no free port in {_PORTS.start}-{_PORTS.stop - 1}")


@contextmanager
def _start_lock() -> Iterator[None]:
    # An abstract socket name is a lock that lives in the kernel: released at death, nothing left on disk.
    deadline = time.monotonic() + START_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        while True:
            try:
                lock.bind("\0rlfleet-local-cluster-start")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ClusterError("another cluster has been starting for too long") from None
                time.sleep(0.1)
        yield
