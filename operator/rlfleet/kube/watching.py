"""The events in the body of a watch, one JSON object per line.

Invariant: a stream that breaks off, goes silent or can not be read ends with an error, never as if the server had
ended it; what the server itself reports (a version that is too old) keeps its own type.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import aiohttp

from .errors import Unavailable
from .transport import typed_error

Obj = dict[str, Any]


class WatchEvent(NamedTuple):
    """``type`` is ADDED, MODIFIED, DELETED or BOOKMARK (of which only metadata.resourceVersion means something)."""

    type: str
    object: Obj


async def events_of(
    response: aiohttp.ClientResponse, inactivity_timeout: float, call: str
) -> AsyncGenerator[WatchEvent, None]:
    """The events until the server ends the stream. ``call`` names it in errors.

    Raises Unavailable when nothing came for as long as the request's sock_read, ``inactivity_timeout``, allows.
    """
    buffer = bytearray()
    try:
        # Lines are cut here: the stream reader's own limit would refuse an object above 128 KiB.
        async for chunk in response.content.iter_any():
            buffer += chunk
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                if line.strip():
                    yield _event(line, call)
    except TimeoutError as e:
        raise Unavailable(f"silent for {inactivity_timeout:g} s", call=call) from e
    except aiohttp.ClientError as e:
        raise Unavailable(f"stream broke: {e!r}", call=call) from e


def _event(line: bytes, call: str) -> WatchEvent:
    try:
        data = json.loads(line)
        kind, obj = data["type"], data["object"]
    except (ValueError, KeyError, TypeError) as e:
        raise Unavailable(f"unreadable watch event: {e!r}", call=call) from e
    if kind == "ERROR":
        raise typed_error(int(obj.get("code") or 500), obj, call, write=False, retry_after=1.0)
    return WatchEvent(kind, obj)
