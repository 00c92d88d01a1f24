"""A real gate that serves TLS, and the operator's own client: who is believed, and certificates that are replaced."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from rlfleet.api.naming import gate_server_name
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Peer, Peers, Silent
from rlfleet.kube.guard import Guard
from rlfleet.tls import AUTHORITY, CERTIFICATE, KEY, ClientTLS, TLSError
from tests.gate import kit
from tests.tls_kit import NAMESPACE, Folder, SecureGate

KEYS = SigningKeys(kit.KEY.private_bytes_raw())
NOWHERE = "http://127.0.0.1:9"
Connect = Callable[..., Peers]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "tls")


@pytest.fixture
def gate(tmp_path: Path, folder: Folder) -> Iterator[SecureGate]:
    """It knows the operator's key, and no engine: none is needed to be asked."""
    host = kit.address()
    folder.fill(folder.authority(), host=host)
    directory = tmp_path / "gate"
    directory.mkdir()
    made = SecureGate(directory, NOWHERE, host, folder)
    made.env["RLFLEET_PUBLIC_KEYS"] = f'{{"{KEYS.current.kid}": "{KEYS.current.public}"}}'
    yield made
    made.close()


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Peers] = []

    def new(authorities: ClientTLS | None) -> Peers:
        made.append(Peers(KEYS, Guard.unelected(), authorities=authorities))
        return made[-1]

    yield new
    for one in made:
        await one.close()


def peer(gate: SecureGate, namespace: str = NAMESPACE) -> Peer:
    return Peer("g", gate.pod_uid, gate.url, gate_server_name(namespace))


async def refusal(peers: Peers, gate: SecureGate, namespace: str = NAMESPACE) -> str:
    with pytest.raises(Silent) as silent:
        await peers.gate_status(peer(gate, namespace), "p")
    return silent.value.what


async def test_only_the_right_authority_and_name_are_believed(
    gate: SecureGate, folder: Folder, connect: Connect, tmp_path: Path
) -> None:
    gate.start()
    assert (await connect(folder.authorities).gate_status(peer(gate), "p")).pod_uid == gate.pod_uid
    stranger = Folder(tmp_path / "stranger")
    stranger.fill(stranger.authority())
    assert "its certificate is refused" in await refusal(connect(stranger.authorities), gate)
    assert "its certificate is refused" in await refusal(connect(None), gate)
    # A neighbour's gates have a certificate of the same authority, with another name.
    assert "its certificate is refused" in await refusal(connect(folder.authorities), gate, "team-b")


def test_nothing_is_answered_in_plain_text(gate: SecureGate) -> None:
    gate.start()
    for path in ("/livez", "/v1/status", "/metrics"):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{gate.host}:9440{path}", timeout=60)
    with socket.create_connection((gate.host, 9440), timeout=60) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = plain.recv(100)
    assert not answer.startswith(b"HTTP")
    # A kubelet asks the address, and names no server.
    assert httpx.get(f"{gate.url}/livez", verify=False, timeout=60).status_code == 200
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{gate.url}/livez", verify=old, timeout=60)


async def test_a_replaced_certificate_counts_at_once_on_both_sides(
    gate: SecureGate, folder: Folder, connect: Connect, tmp_path: Path
) -> None:
    gate.start()
    first = folder.path / "first.crt"
    first.write_bytes((folder.path / AUTHORITY).read_bytes())
    running = connect(folder.authorities)
    assert (await running.gate_status(peer(gate), "p")).pod_uid == gate.pod_uid
    assert gate.process is not None
    before = gate.process.popen.pid
    folder.fill(folder.authority(), host=gate.host)
    # The operator's client follows its file; whoever still believes the first authority alone is refused.
    assert (await running.gate_status(peer(gate), "p")).pod_uid == gate.pod_uid
    assert "its certificate is refused" in await refusal(connect(ClientTLS(first)), gate)
    assert gate.process.popen.pid == before


async def test_files_that_do_not_fit_together_change_nothing(
    gate: SecureGate, folder: Folder, connect: Connect, tmp_path: Path
) -> None:
    gate.start()
    good = {name: (folder.path / name).read_bytes() for name in (CERTIFICATE, KEY, AUTHORITY)}
    other = Folder(tmp_path / "other")
    other.fill(other.authority(), host=gate.host)
    key = (other.path / KEY).read_bytes()
    for name, data in ((KEY, key), (CERTIFICATE, b"not a certificate"), (AUTHORITY, b"neither")):
        running = connect(folder.authorities)
        folder.put(name, data)
        assert (await running.gate_status(peer(gate), "p")).pod_uid == gate.pod_uid, name
        folder.put(name, good[name])
    (folder.path / CERTIFICATE).unlink()
    assert (await connect(folder.authorities).gate_status(peer(gate), "p")).pod_uid == gate.pod_uid


def test_a_gate_without_a_usable_certificate_says_which_file(gate: SecureGate, folder: Folder) -> None:
    (folder.path / KEY).write_text("not a key")
    gate.process = kit.Process("gate", gate.directory, [kit.sys.executable, "-m", "rlfleet.gate"], gate.env)
    assert gate.process.popen.wait(120) == 2
    said = gate.process.log.read_text()
    assert "RLFLEET_TLS_DIR" in said
    assert str(folder.path / KEY) in said


def test_authorities_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for name, content in (("missing.crt", None), ("empty.crt", ""), ("text.crt", "hello")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(TLSError, match=name):
            ClientTLS(tmp_path / name)
