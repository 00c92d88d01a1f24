"""Operator, gates and sender over TLS: whole rounds, and certificates and authority replaced under one that runs."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import pki
from e2e.cluster.local import LocalCluster
from e2e.scenarios.adopting import SYNC, active, guide, keys, shell
from e2e.scenarios.kit import Fleet, Operator, trainer_pod, wait_until
from e2e.scenarios.kit import http as call
from rlfleet.api.naming import gate_server_name, sender_server_name

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECRET = "rlfleet-tls"
MOUNT = "/var/run/rlfleet/tls"
DISK = "update_weights_from_disk"


class Certificates:
    """The Secret of one namespace, and the operator's file of authorities."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.file = folder / "ca.crt"
        self.authorities: list[pki.Authority] = []

    def authority(self) -> pki.Authority:
        """A new one, believed by the operator beside the earlier ones."""
        made = pki.Authority(self.folder / f"authority-{len(self.authorities)}")
        self.authorities.append(made)
        pki.write_private(self.file, self.bundle())
        return made

    def bundle(self) -> bytes:
        """All authorities."""
        return b"".join(a.certificate.read_bytes() for a in self.authorities)

    def apply(self, namespace: str, by: pki.Authority) -> None:
        """Write the Secret: a certificate of ``by``, and every authority so far."""
        names = (gate_server_name(namespace), sender_server_name(namespace))
        pair = by.issue("leaf", "rlfleet", addresses=names)
        data = {"tls.crt": pair.certificate.read_bytes(), "tls.key": pair.key.read_bytes(), "ca.crt": self.bundle()}
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET, "namespace": namespace},
                "type": "kubernetes.io/tls",
                "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
            }
        )


@pytest.fixture
def certificates(cluster: LocalCluster, tmp_path: Path) -> Certificates:
    made = Certificates(cluster, tmp_path)
    made.authority()
    return made


@pytest.fixture
def secure(cluster: LocalCluster, certificates: Certificates, tmp_path: Path) -> Iterator[Operator]:
    one = Operator(
        cluster, tmp_path / "operator", RLFLEET_TLS_SECRET=SECRET, RLFLEET_PEER_CA_FILE=str(certificates.file)
    )
    one.start()
    yield one
    one.stop()


def issuer(pod: dict[str, Any], port: int, name: str, authority: pki.Authority) -> bool:
    """Whether the listener shows a certificate of this authority and with this name."""
    context = ssl.create_default_context(cafile=authority.certificate)
    with socket.create_connection((pod["status"]["podIP"], port), timeout=10) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=name):
                return True
        except ssl.SSLCertVerificationError:
            return False


def secure_trainer(fleet: Fleet) -> None:
    """The trainer of Fleet with the certificate mounted."""
    keys = wait_until(lambda: fleet.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")
    text = "{" + ", ".join(f'"{k["kid"]}": "{k["key"]}"' for k in keys) + "}"
    pod = trainer_pod(fleet.namespace, {"RLFLEET_PUBLIC_KEYS": text, "RLFLEET_TLS_DIR": MOUNT})
    pod["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": SECRET}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "tls", "mountPath": MOUNT, "readOnly": True}]
    fleet.cluster.apply(pod)
    fleet.wait_trainer()


def test_authority_and_certificates_are_replaced_under_a_running_round(
    cluster: LocalCluster, secure: Operator, certificates: Certificates, namespace: str
) -> None:
    fleet = Fleet(cluster, namespace)
    certificates.apply(namespace, certificates.authorities[0])
    deadlines = {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 120}
    fleet.pipeline(sync={"deadlines": deadlines})
    fleet.pool(2)
    secure_trainer(fleet)
    pods = fleet.ready_engines(2)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    assert fleet.status("rlpipeline", "p")["sender"]["url"].startswith("https://")
    gate_name, sender_name = gate_server_name(namespace), sender_server_name(namespace)
    for pod, port, name in ((pods[0], 9440, gate_name), (fleet.pod("trainer"), 9450, sender_name)):
        with pytest.raises((OSError, http.client.HTTPException)):
            call("GET", f"http://{pod['status']['podIP']}:{port}/livez")
        assert issuer(pod, port, name, certificates.authorities[0])

    # While it does not load the round cannot end.
    fleet.fault(pods[0], DISK, action="hold", times=1)
    fleet.publish(0)
    name = fleet.order(0)
    wait_until(lambda: fleet.phase(name) == "Transferring", "the load to begin")
    # First everybody believes both authorities, then the certificates are the new one's.
    new = certificates.authority()
    certificates.apply(namespace, certificates.authorities[0])
    certificates.apply(namespace, new)
    listeners = [*((pod, 9440, gate_name) for pod in pods), (fleet.pod("trainer"), 9450, sender_name)]
    wait_until(lambda: all(issuer(*at, new) for at in listeners), "all listeners to show the new certificate")
    assert fleet.phase(name) == "Transferring"
    fleet.heal(pods[0])
    assert fleet.ended(name)["status"]["phase"] == "Succeeded"
    assert [fleet.label(pod) for pod in pods] == ["0", "0"]
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    # Nobody was replaced or restarted for it.
    assert [p["metadata"]["uid"] for p in fleet.engines()] == [p["metadata"]["uid"] for p in pods]
    for pod in fleet.engines():
        gate = next(c for c in pod["status"]["initContainerStatuses"] if c["name"] == "gate")
        assert gate["restartCount"] == 0


def test_an_operator_that_does_not_believe_them_gives_no_orders(
    cluster: LocalCluster, secure: Operator, certificates: Certificates, namespace: str
) -> None:
    fleet = Fleet(cluster, namespace)
    stranger = pki.Authority(certificates.folder / "stranger")
    certificates.apply(namespace, stranger)
    fleet.pipeline()
    fleet.pool(1)
    secure_trainer(fleet)

    def refused() -> bool:
        conditions = fleet.status("rlpipeline", "p").get("conditions") or []
        return any("its certificate is refused" in c["message"] for c in conditions if c["type"] == "SenderReady")

    wait_until(refused, "the pipeline to say why its sender is not ready")
    (pod,) = fleet.engines()
    # Its gate is never enrolled, so its engine never starts.
    assert all("running" not in c.get("state", {}) for c in pod["status"].get("containerStatuses") or [])
    certificates.apply(namespace, certificates.authorities[0])
    fleet.ready_engines(1)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"


def test_adopted_gates_take_tls_up_pod_by_pod(
    cluster: LocalCluster, secure: Operator, certificates: Certificates, namespace: str, tmp_path: Path
) -> None:
    fleet = Fleet(cluster, namespace)
    certificates.apply(namespace, certificates.authorities[0])
    fleet.pipeline(sync=SYNC)
    keys(fleet)
    come, take_up, _ = guide(tmp_path / "guide")
    shell(fleet, tmp_path / "guide", come)
    secure_trainer(fleet)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    names = ["demo-engines-0", "demo-engines-1"]
    before = [fleet.pod(name) for name in names]
    for pod in before:
        assert call("GET", f"http://{pod['status']['podIP']}:9440/livez")[0] == 200

    shell(fleet, tmp_path / "guide", take_up)
    after = [fleet.pod(name) for name in names]
    wait_until(lambda: active(fleet) == {p["metadata"]["uid"] for p in after}, "the new pods to have caught up")
    assert not {p["metadata"]["uid"] for p in before} & {p["metadata"]["uid"] for p in after}
    for pod in after:
        with pytest.raises((OSError, http.client.HTTPException)):
            call("GET", f"http://{pod['status']['podIP']}:9440/livez")
        assert issuer(pod, 9440, gate_server_name(namespace), certificates.authorities[0])
    done = fleet.sync(1)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(names, "Ok")
    assert [(fleet.label(p), fleet.paused(p)) for p in after] == [("1", False)] * 2
