"""A sender that serves TLS and pushes to a gate that does: nobody in between reads weights or tokens."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api import wire
from rlfleet.api.naming import gate_server_name, sender_server_name
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Caller, Peer, Peers, Silent
from rlfleet.kube.guard import Guard
from rlfleet.sender import SenderError, WeightSender
from rlfleet.tls import AUTHORITY, ClientTLS
from tests.gate import kit
from tests.sender.caller import SECONDS, Operator
from tests.tls_kit import NAMESPACE, Folder, SecureGate

Make = Callable[..., WeightSender]
MakeOperator = Callable[..., Operator]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "tls")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[kit.Engine]:
    made = kit.Engine(tmp_path)
    yield made.up()
    made.close()


@pytest.fixture
def gate(engine: kit.Engine, tmp_path: Path, folder: Folder) -> Iterator[SecureGate]:
    folder.fill(folder.authority(), host=engine.host)
    directory = tmp_path / "gate"
    directory.mkdir()
    made = SecureGate(directory, engine.url, engine.host, folder)
    made.start()
    yield made
    made.close()


def test_bytes_travel_only_to_a_gate_whose_certificate_is_believed(
    engine: kit.Engine, gate: SecureGate, folder: Folder, make_sender: Make, make_operator: MakeOperator, tmp_path: Path
) -> None:
    keys = {kit.KID: kit.public(kit.KEY)}
    sender = make_sender(public_keys=keys, tls_dir=folder.path)
    manifest = sender.publish(4, torch_state(MODELS["tiny"], 11))
    at_gate = kit.Operator(gate).ready()
    named = {"version": 4, "manifestDigest": manifest.digest}
    at_gate.ok("Prepare", transport="Serialized", totalBytes=manifest.total_bytes, **named)
    with pytest.raises(httpx.TransportError):
        httpx.get(sender.url.replace("https:", "http:") + "/livez", timeout=60)
    at_sender = make_operator(sender)
    at_sender.http = believing(at_sender.http, folder)
    at_sender.key = kit.KEY
    at_sender.operation, at_sender.generation = at_gate.operation, at_gate.generation
    assert at_sender.hold(4, manifest.digest).status_code == 200

    def push(attempt: int, at: Operator, namespace: str = NAMESPACE) -> dict[str, object]:
        target = wire.PushTarget(
            engine="pool-0",
            url=gate.url,
            pod_uid=gate.pod_uid,
            buckets=True,
            server_name=gate_server_name(namespace),
            token=at.push_token(gate.pod_uid),
        )
        order = wire.PushOrder(manifest_digest=manifest.digest, targets=(target,), deadline_seconds=SECONDS)
        done: dict[str, object] = at.run(order, attempt=attempt).result["targets"]["pool-0"]
        return done

    refused = push(1, at_sender, "team-b")
    assert not refused["ok"]
    assert "its certificate is refused" in str(refused["error"])
    assert at_gate.status()["staged"]["manifestReceived"] is False
    # The gate's certificate and the sender's view of authorities are replaced while both run.
    folder.fill(folder.authority(), host=engine.host)
    at_sender.http, gate.http = believing(at_sender.http, folder), believing(gate.http, folder)
    done = push(2, at_sender)
    assert done["ok"], done
    assert at_gate.status()["staged"]["complete"]


def believing(http: httpx.Client, folder: Folder) -> httpx.Client:
    """A client in place of ``http`` that believes the authority of now."""
    http.close()
    context = ssl.create_default_context(cafile=folder.path / AUTHORITY)
    return httpx.Client(base_url=http.base_url, verify=context, timeout=SECONDS, trust_env=False)


def test_a_sender_without_authorities_pushes_nothing_to_a_gate_that_serves_tls(
    gate: SecureGate, make_sender: Make, make_operator: MakeOperator
) -> None:
    sender = make_sender(public_keys={kit.KID: kit.public(kit.KEY)})
    manifest = sender.publish(4, torch_state(MODELS["tiny"], 11))
    at_sender = make_operator(sender)
    at_sender.key = kit.KEY
    assert at_sender.hold(4, manifest.digest).status_code == 200
    target = wire.PushTarget(
        engine="pool-0",
        url=gate.url,
        pod_uid=gate.pod_uid,
        buckets=True,
        server_name=gate_server_name(NAMESPACE),
        token=at_sender.push_token(gate.pod_uid),
    )
    order = wire.PushOrder(manifest_digest=manifest.digest, targets=(target,), deadline_seconds=SECONDS)
    done = at_sender.run(order, attempt=1).result["targets"]["pool-0"]
    assert not done["ok"]
    assert "RLFLEET_TLS_DIR" in done["error"]


async def test_the_operator_believes_a_sender_by_its_namespace(
    folder: Folder, make_sender: Make, tmp_path: Path
) -> None:
    folder.fill(folder.authority())
    keys = SigningKeys(bytes(32))
    sender = make_sender(public_keys=keys.public_text(), tls_dir=folder.path)
    peers = Peers(keys, Guard.unelected(), authorities=ClientTLS(folder.path / AUTHORITY))
    try:
        right = Peer("s", sender.pod_uid, sender.url, sender_server_name(NAMESPACE))
        assert (await peers.sender_fence(right, Caller("p", "o", 1))).pod_uid == sender.pod_uid
        # The certificate of the neighbour's senders, and that of its own gates' name elsewhere, are not this one.
        for name in (sender_server_name("team-b"), gate_server_name("team-b")):
            with pytest.raises(Silent, match="its certificate is refused"):
                await peers.sender_status(Peer("s", sender.pod_uid, sender.url, name), "p")
    finally:
        await peers.close()


def test_a_folder_without_a_certificate_is_named(make_sender: Make, tmp_path: Path) -> None:
    with pytest.raises(SenderError, match=r"RLFLEET_TLS_DIR.*tls\.crt"):
        make_sender(tls_dir=tmp_path)
