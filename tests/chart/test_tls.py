"""The chart's TLS: what the operator is told, and certificates of the chart's own that gates and clients can use."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from pathlib import Path

import pytest

from rlfleet.api.naming import gate_server_name, sender_server_name
from rlfleet.tls import AUTHORITY, ClientTLS, ServerTLS
from tests.chart.kit import ON, Obj, chart, of_kind, one, refusal
from tests.chart.test_render import parse

SELF_SIGNED: Obj = {"tls": {"enabled": True, "selfSigned": {"enabled": True, "namespaces": ["team-a", "team-b"]}}}


def test_the_operator_is_told_which_secret_gates_mount_and_whom_to_believe(tmp_path: Path) -> None:
    spec = one(chart(tmp_path, ON), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    chosen = parse(container["args"])
    assert chosen.tls_secret == "certs"
    (mount,) = [m for m in container["volumeMounts"] if chosen.peer_ca_file.startswith(m["mountPath"])]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    # The key of an authority made by the chart lies in that Secret too: it is not mounted.
    items = [{"key": "ca.crt", "path": "ca.crt"}]
    assert volume["secret"] == {"secretName": "authority", "items": items}
    assert chosen.peer_ca_file == f"{mount['mountPath']}/ca.crt"
    monitors = of_kind(chart(tmp_path, ON), "PodMonitor")
    assert [e["scheme"] for m in monitors for e in m["spec"]["podMetricsEndpoints"]] == ["https", "https"]
    plain = parse(one(chart(tmp_path), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"])
    assert (plain.tls_secret, plain.peer_ca_file) == ("", "")


def test_certificates_that_the_chart_makes_are_believed_for_their_namespace(tmp_path: Path) -> None:
    secrets = {
        (s["metadata"]["namespace"], s["metadata"]["name"]): s for s in of_kind(chart(tmp_path, SELF_SIGNED), "Secret")
    }
    assert set(secrets) == {("rlfleet-system", "rlfleet-ca"), ("team-a", "rlfleet-tls"), ("team-b", "rlfleet-tls")}
    for (namespace, name), secret in secrets.items():
        folder = tmp_path / namespace
        folder.mkdir()
        for key, value in secret["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))
        assert ("ca.key" in secret["data"]) == (name == "rlfleet-ca"), "the authority's key leaves its Secret"
    authorities = ClientTLS(tmp_path / "rlfleet-system" / AUTHORITY)
    for namespace, other in (("team-a", "team-b"), ("team-b", "team-a")):
        server = ServerTLS(tmp_path / namespace)
        for make in (gate_server_name, sender_server_name):
            assert handshake(server, authorities, make(namespace)) == "TLSv1.3"
            with pytest.raises(ssl.SSLCertVerificationError):
                handshake(server, authorities, make(other))


def handshake(server: ServerTLS, authorities: ClientTLS, name: str) -> str | None:
    """The protocol that both agree on."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server.context().wrap_socket(theirs, server_side=True).close()
        except ssl.SSLError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with authorities.context().wrap_socket(ours, server_hostname=name) as secure:
            return secure.version()
    finally:
        ours.close()
        thread.join(30)


def test_namespaces_must_be_named_for_certificates(tmp_path: Path) -> None:
    values: Obj = {"tls": {"enabled": True, "selfSigned": {"enabled": True}}}
    assert "tls.selfSigned.namespaces" in refusal(tmp_path, values)
    made = of_kind(chart(tmp_path, {**values, "watchNamespaces": ["team-c"]}), "Secret")
    assert [s["metadata"]["namespace"] for s in made] == ["rlfleet-system", "team-c"]
