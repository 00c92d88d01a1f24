"""Slow, silent and malformed clients of a listener, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from rlfleet.api.wire import ErrorBody
from rlfleet.serving import expect_continue, listen

SECONDS = 120.0
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/", answer, expect_handler=expect_continue)
    sock = socket.create_server(("127.0.0.1", 0))
    listener = await listen(app, at=sock, shutdown_seconds=1, head_seconds=0.5, idle_seconds=0.5)
    yield sock.getsockname()[1]
    await listener.close()


async def send(port: int, raw: bytes) -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    await writer.drain()
    return reader, writer


async def to_the_end(stream: Stream) -> bytes:
    """What the server sends until it closes: a server that never closes fails the test."""
    reader, writer = stream
    try:
        async with asyncio.timeout(SECONDS):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "raw",
    [b"", b"GE", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "half a word", "no headers", "no end"],
)
async def test_a_first_request_whose_head_never_ends_is_closed(port: int, raw: bytes) -> None:
    assert await to_the_end(await send(port, raw)) == b""


async def test_a_connection_that_stays_idle_after_a_request_is_closed(port: int) -> None:
    received = await to_the_end(await send(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert received.startswith(b"HTTP/1.1 200")
    # The head of a second request that never ends does not keep it open either.
    received = await to_the_end(await send(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT"))
    assert received.count(b"HTTP/1.1 200") == 1


async def test_a_slow_body_is_not_cut_by_the_limit_of_the_head(port: int) -> None:
    reader, writer = await send(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
    for byte in b"abc":
        await asyncio.sleep(0.4)  # three times this is more than the limit
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x" * 20_000 + b": y\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["TLS", "words", "version", "long header", "length"],
)
async def test_what_is_no_http_gets_the_protocols_error(port: int, raw: bytes) -> None:
    head, _, body = (await to_the_end(await send(port, raw))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1."), head
    assert b" 400 " in head.split(b"\r\n", 1)[0]
    assert ErrorBody.model_validate_json(body).reason == "Invalid"


async def test_an_unknown_expectation_is_refused_and_the_known_one_met(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\nExpect: "
    refused = await to_the_end(await send(port, head + b"coffee\r\n\r\nok"))
    assert refused.startswith(b"HTTP/1.1 417")
    assert ErrorBody.model_validate_json(refused.partition(b"\r\n\r\n")[2]).reason == "Invalid"
    met = await to_the_end(await send(port, head + b"100-continue\r\n\r\nok"))
    assert met.startswith(b"HTTP/1.1 100 Continue")
    assert met.endswith(b"ok")


async def test_closing_ends_connections_that_wait(port: int) -> None:
    app = web.Application()
    sock = socket.create_server(("127.0.0.1", 0))
    listener = await listen(app, at=sock, shutdown_seconds=1, head_seconds=3600, idle_seconds=3600)
    stream = await send(sock.getsockname()[1], b"GET / HT")
    async with asyncio.timeout(SECONDS):
        await listener.close()
    assert await to_the_end(stream) == b""
