"""Clients that send half of something: they cost the gate nothing, and end by its own clock."""

from __future__ import annotations

import socket

from rlfleet.api.wire import ErrorBody
from tests.gate.kit import Gate, Operator, Weights

MANY = 60


def half(gate: Gate, raw: str) -> socket.socket:
    client = socket.create_connection((gate.host, 9440), timeout=60)
    client.sendall(raw.encode())
    return client


def to_the_end(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_half_sent_requests_end_by_the_gates_clock_and_stop_nobody(operator: Operator, gate: Gate) -> None:
    weights = Weights.of(1)
    operator.prepare(weights, 1)
    token = operator.token()
    heads = [half(gate, "POST /v1/fence HTTP/1.1\r\nHost: g\r\nX-Slow") for _ in range(MANY)]
    post = f"Host: g\r\nAuthorization: Bearer {token}\r\nContent-Length: 500\r\n\r\n{{"
    bodies = [half(gate, f"POST {path} HTTP/1.1\r\n{post}") for path in ("/v1/fence", "/v1/enroll", "/v1/operations")]
    strangers = [half(gate, "POST /v1/fence HTTP/1.1\r\nHost: g\r\nContent-Length: 500\r\n\r\n{") for _ in range(3)]
    # Meanwhile the gate works.
    operator.push_all(weights)
    operator.ok("Pause")
    operator.ok("Load", **operator.load_order(weights, 1))
    assert [to_the_end(client) for client in heads] == [b""] * MANY
    for client, reason in [*((b, "Invalid") for b in bodies), *((s, "Unauthenticated") for s in strangers)]:
        _, _, body = to_the_end(client).partition(b"\r\n\r\n")
        assert ErrorBody.model_validate_json(body).reason == reason
    assert operator.status()["fence"]["generation"] == operator.generation


def test_what_is_no_http_gets_the_protocols_error(operator: Operator, gate: Gate) -> None:
    for raw in ("nonsense\r\n\r\n", "GET /v1/status HTTP/7.7\r\n\r\n"):
        head, _, body = to_the_end(half(gate, raw)).partition(b"\r\n\r\n")
        assert b" 400 " in head.split(b"\r\n", 1)[0]
        assert ErrorBody.model_validate_json(body).reason == "Invalid"
    answer = gate.http.post("/v1/fence", json={}, headers=operator.headers() | {"Expect": "coffee"})
    assert (answer.status_code, answer.json()["reason"]) == (417, "Invalid")
