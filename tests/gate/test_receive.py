"""Receiving buckets while a round is prepared anew: in one process, so that the two meet where they must."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlfleet.api.wire import ErrorReason, Transport
from rlfleet.gate.errors import GateError
from rlfleet.gate.receive import receive_bucket
from rlfleet.gate.staging import Staging, StagingArea
from tests.gate.kit import Weights


class Body:
    """A request's body that is there, or (None) never comes."""

    def __init__(self, data: bytes | None) -> None:
        self._left = None if data is None else [data, b""]

    async def readany(self) -> bytes:
        if self._left is None:
            await asyncio.Event().wait()
        return self._left.pop(0)


def push(data: bytes | None) -> Any:
    return SimpleNamespace(content=Body(data), content_length=None)


async def test_a_push_that_is_tried_again_while_the_round_is_prepared_anew_brings_nothing(tmp_path: Path) -> None:
    area, old, new = StagingArea(tmp_path, 2**26), Weights.random(1000), Weights.random(1000)
    one, two = (
        Staging(operation, 1, w.digest, Transport.SERIALIZED, w.total) for operation, w in (("r1", old), ("r2", new))
    )
    await area.prepare(one)
    area.accept_manifest(one, old.manifest)
    hangs = asyncio.create_task(receive_bucket(area, one, 0, push(None)))
    await asyncio.sleep(0)
    again = asyncio.create_task(receive_bucket(area, one, 0, push(old.buckets[0])))
    await asyncio.sleep(0)
    await area.prepare(two)
    for task in (hangs, again):
        with pytest.raises(GateError) as e:
            await task
        assert e.value.reason is ErrorReason.NOT_STAGED
    area.accept_manifest(two, new.manifest)
    await receive_bucket(area, two, 0, push(new.buckets[0]))
    (file,) = area.directory.iterdir()
    assert file.read_bytes().endswith(new.buckets[0])
    assert (two.is_complete, one.is_complete) == (True, False)
