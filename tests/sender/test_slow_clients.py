"""Clients that send half of something: they cost the sender nothing, and end by its own clock."""

from __future__ import annotations

import socket

from rlfleet.api.wire import ErrorBody
from rlfleet.sender import WeightSender
from tests.sender.caller import Operator, weights

MANY = 60


def half(sender: WeightSender, raw: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", sender.port), timeout=60)
    client.sendall(raw.encode())
    return client


def to_the_end(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_half_sent_requests_end_by_the_senders_clock_and_stop_nobody(sender: WeightSender, operator: Operator) -> None:
    heads = [half(sender, "POST /v1/hold HTTP/1.1\r\nHost: s\r\nX-Slow") for _ in range(MANY)]
    post = f"Host: s\r\nAuthorization: Bearer {operator.token()}\r\nContent-Length: 500\r\n\r\n{{"
    bodies = [half(sender, f"POST {path} HTTP/1.1\r\n{post}") for path in ("/v1/fence", "/v1/hold", "/v1/operations")]
    # Meanwhile the sender works.
    sender.publish(1, weights())
    assert operator.hold(1).status_code == 200
    assert [to_the_end(client) for client in heads] == [b""] * MANY
    for client in bodies:
        _, _, body = to_the_end(client).partition(b"\r\n\r\n")
        assert ErrorBody.model_validate_json(body).reason == "Invalid"
    assert operator.status().hold is not None


def test_what_is_no_http_gets_the_protocols_error(sender: WeightSender, operator: Operator) -> None:
    head, _, body = to_the_end(half(sender, "nonsense\r\n\r\n")).partition(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n", 1)[0]
    assert ErrorBody.model_validate_json(body).reason == "Invalid"
    headers = {"Authorization": f"Bearer {operator.token()}", "Expect": "coffee"}
    answer = operator.http.post(f"{sender.url}/v1/fence", json={}, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (417, "Invalid")
