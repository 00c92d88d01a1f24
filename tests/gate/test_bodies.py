"""What is not the protocol gets a clear 4xx with the protocol's error body, and the gate lives on."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from rlfleet.api.wire import ErrorBody
from tests.gate.kit import Operator

PATHS = ("/v1/enroll", "/v1/fence", "/v1/operations")
BAD: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not an object": b"[1]",
    "deep": b'{"pipeline":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "unknown field": b'{"pipeline":"p","operation":"o","generation":1,"force":true}',
    "not UTF-8": b'{"pipeline":"\xff"}',
    "huge number": b'{"pipeline":"p","operation":"o","generation":1e400}',
    "name with spaces": b'{"pipeline":"a b","operation":"o","generation":1}',
    "negative": b'{"pipeline":"p","operation":"o","generation":-5}',
}


@pytest.mark.parametrize("path", PATHS)
def test_malformed_bodies(operator: Operator, path: str) -> None:
    for name, raw in BAD.items():
        answer = operator.gate.http.post(path, content=raw, headers=operator.headers())
        assert answer.status_code == 400, name
        assert ErrorBody.model_validate_json(answer.content).reason == "Invalid", name
    assert operator.status()["fence"]["generation"] == 1000


def test_orders_are_checked_field_by_field(operator: Operator) -> None:
    good = operator.body("Pause")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"order": {"kind": "Explode"}}, "order"),
        ({"order": {"kind": "Pause", "mode": "InPlace"}}, "mode"),
        ({"order": {"kind": "Pause", "drainSeconds": -1}}, "drainSeconds"),
        ({"id": "../../etc/passwd"}, "id"),
        ({"attempt": 0}, "attempt"),
        ({"order": {"kind": "Prepare", "transport": "Carrier", "version": 1}}, "transport"),
        ({"order": {"kind": "Resume", "version": -2, "manifestDigest": "x"}}, "version"),
    ]
    for change, field in cases:
        answer = operator.post(good | change)
        assert (answer.status_code, answer.json()["reason"]) == (400, "Invalid"), change
        assert field in answer.json()["message"]
    assert operator.status()["attempts"] == {}


def test_broadcast_needs_its_group(operator: Operator) -> None:
    order = {"transport": "Broadcast", "version": 1, "manifestDigest": "sha256:" + "0" * 64}
    assert operator.refused("Load", **order) == "Invalid"


def test_too_large_bodies_are_refused_without_being_read(operator: Operator) -> None:
    answer = operator.gate.http.post("/v1/fence", content=b" " * (256 * 1024 + 1), headers=operator.headers())
    assert (answer.status_code, answer.json()["reason"]) == (413, "TooLarge")
    pieces = (b" " * 65536 for _ in range(5))
    answer = operator.gate.http.post("/v1/fence", content=pieces, headers=operator.headers())
    assert (answer.status_code, answer.json()["reason"]) == (413, "TooLarge")


def test_a_body_shorter_than_announced_is_no_order(operator: Operator) -> None:
    body = json.dumps(operator.body("Discard")).encode()
    with socket.create_connection((operator.gate.host, 9440)) as connection:
        connection.sendall(
            f"POST /v1/operations HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {operator.token()}\r\n"
            f"Content-Length: {len(body) + 10}\r\n\r\n".encode()
            + body
        )
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        assert b" 202 " not in connection.recv(4096)
    assert operator.status()["attempts"] == {}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: g\r\nX-Big: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/fence HTTP/1.1\r\nHost: g\r\nContent-Length: nonsense\r\n\r\n",
        b"POST /v1/fence HTTP/1.1\r\nHost: g\r\nContent-Length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
    ],
)
def test_malformed_http_is_a_400_and_nothing_more(operator: Operator, head: bytes) -> None:
    with socket.create_connection((operator.gate.host, 9440)) as connection:
        connection.settimeout(10)
        connection.sendall(head)
        assert connection.recv(4096).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert operator.gate.http.get("/livez").status_code == 200


def test_unknown_paths_and_methods_answer_in_the_protocols_words(operator: Operator) -> None:
    for method, path, status in (("GET", "/v2/status", 404), ("DELETE", "/v1/status", 405), ("GET", "/v1/fence", 405)):
        answer = operator.gate.http.request(method, path)
        assert answer.status_code == status
        ErrorBody.model_validate_json(answer.content)
