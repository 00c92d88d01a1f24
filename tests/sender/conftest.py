"""Senders behind real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlfleet.sender import WeightSender
from tests.sender.caller import POD_UID, Operator, public


@pytest.fixture(scope="session")
def key() -> Ed25519PrivateKey:
    """The operator's key."""
    return Ed25519PrivateKey.generate()


@pytest.fixture
def make_sender(key: Ed25519PrivateKey) -> Iterator[Callable[..., WeightSender]]:
    """Makes started senders; they are closed at the end."""
    made: list[WeightSender] = []

    def make(**change: Any) -> WeightSender:
        sender = WeightSender(
            "127.0.0.1", 0, **({"pod_uid": POD_UID, "public_keys": {"k1": public(key)}, "bucket_bytes": 4096} | change)
        )
        made.append(sender.start())
        return sender

    yield make
    for sender in made:
        sender.close()


@pytest.fixture
def sender(make_sender: Callable[..., WeightSender]) -> WeightSender:
    """A started sender without weights."""
    return make_sender()


@pytest.fixture
def make_operator(key: Ed25519PrivateKey) -> Iterator[Callable[[WeightSender], Operator]]:
    """Makes callers of a sender."""
    made: list[Operator] = []

    def make(sender: WeightSender) -> Operator:
        made.append(Operator(sender.url, key, sender.incarnation))
        return made[-1]

    yield make
    for one in made:
        one.http.close()


@pytest.fixture
def operator(sender: WeightSender, make_operator: Callable[[WeightSender], Operator]) -> Operator:
    """A caller of ``sender``."""
    return make_operator(sender)
