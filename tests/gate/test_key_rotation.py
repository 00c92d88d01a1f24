"""The operator's own client meets a real gate while the signing key is replaced: told by the old, then only the new."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rlfleet.api import wire
from rlfleet.api.tokens import PublicKeys, Scope, verify
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Caller, Peer, Peers, Refused
from rlfleet.kube.guard import Guard
from tests.gate.kit import KEY, KID, Gate, Operator, public

PIPELINE = "pipeline-uid"
OLD = KEY.private_bytes_raw()
NEW, NEWER = b"n" * 32, b"m" * 32


@pytest.fixture
def known(operator: Operator) -> Gate:
    """A gate that knows the old key, under the id that the operator gives it."""
    assert operator.enroll(publicKeys=SigningKeys(OLD).public_text()).status_code == 200
    return operator.gate


@pytest_asyncio.fixture
async def peers() -> AsyncIterator[list[Peers]]:
    made: list[Peers] = []
    yield made
    for one in made:
        await one.close()


def client(made: list[Peers], keys: SigningKeys) -> Peers:
    made.append(Peers(keys, Guard.unelected()))
    return made[-1]


def enrolment(gate: Gate, keys: SigningKeys) -> wire.EnrollRequest:
    return wire.EnrollRequest(
        pipeline=PIPELINE,
        generation=1000,
        pod_uid=gate.pod_uid,
        pool="pool",
        engine="pool-0",
        engine_url=gate.engine_url,
        public_keys=keys.public_text(),
    )


def believed(token: str, keys: SigningKeys, peer: Peer) -> bool:
    """Who knows these keys takes it for a push token."""
    return verify(token, PublicKeys(keys.public_text()), audience=peer.pod_uid).scope is Scope.PUSH


async def test_the_new_key_is_told_by_the_old_and_then_stands_alone(known: Gate, peers: list[Peers]) -> None:
    peer = Peer("g", known.pod_uid, known.url)
    keys = SigningKeys(NEW, previous=OLD)
    rotating = client(peers, keys)
    assert (await rotating.gate_status(peer, PIPELINE)).enrolled
    # Pushes go by the key that this gate knows: no round fails because it began in the middle of a rotation.
    caller = Caller(PIPELINE, "round-1", 1000)
    assert believed(rotating.push_token(peer, caller, 60), SigningKeys(OLD), peer)
    await rotating.enroll(peer, enrolment(known, keys))
    # Both are accepted while the Secret names both, and the old one signs: whoever was not told yet knows only that.
    assert believed(rotating.push_token(peer, caller, 60), SigningKeys(OLD), peer)
    for one in (OLD, NEW):
        assert (await client(peers, SigningKeys(one)).gate_status(peer, PIPELINE)).enrolled
    # Then the new one alone, in the process that goes on and in its successors.
    assert keys.adopt(SigningKeys(NEW))
    assert believed(rotating.push_token(peer, caller, 60), SigningKeys(NEW), peer)
    await rotating.enroll(peer, enrolment(known, keys))
    assert (await client(peers, SigningKeys(NEW)).gate_status(peer, PIPELINE)).enrolled
    with pytest.raises(Refused) as refused:
        await client(peers, SigningKeys(OLD)).gate_status(peer, PIPELINE)
    assert refused.value.body.reason is wire.ErrorReason.UNAUTHENTICATED


async def test_no_key_but_a_known_one_can_bring_another(known: Gate, peers: list[Peers]) -> None:
    peer = Peer("g", known.pod_uid, known.url)
    for keys in (SigningKeys(NEW), SigningKeys(NEW, previous=NEWER)):
        with pytest.raises(Refused) as refused:
            await client(peers, keys).enroll(peer, enrolment(known, keys))
        assert refused.value.body.reason is wire.ErrorReason.UNAUTHENTICATED
    assert (await client(peers, SigningKeys(OLD)).gate_status(peer, PIPELINE)).enrolled


async def test_calls_side_by_side_all_find_the_known_key(known: Gate, peers: list[Peers]) -> None:
    peer = Peer("g", known.pod_uid, known.url)
    keys = SigningKeys(OLD)
    assert keys.adopt(SigningKeys(NEW))
    running = client(peers, keys)
    found = await asyncio.gather(*(running.gate_status(peer, PIPELINE) for _ in range(4)))
    assert all(status.enrolled for status in found)


async def test_a_key_that_was_replaced_at_once_still_tells_its_successor(known: Gate, peers: list[Peers]) -> None:
    peer = Peer("g", known.pod_uid, known.url)
    keys = SigningKeys(OLD)
    running = client(peers, keys)
    assert (await running.gate_status(peer, PIPELINE)).enrolled
    assert keys.adopt(SigningKeys(NEW))
    assert not keys.adopt(SigningKeys(NEW))
    assert list(keys.public_text()) == [keys.current.kid]
    await running.enroll(peer, enrolment(known, keys))
    assert (await client(peers, SigningKeys(NEW)).gate_status(peer, PIPELINE)).enrolled
    with pytest.raises(Refused):
        await client(peers, SigningKeys(OLD)).gate_status(peer, PIPELINE)


def test_who_holds_only_what_pods_hold_cannot_sign(operator: Operator) -> None:
    """An engine pod and a trainer know public keys and tokens meant for them; neither drives a gate."""
    http = operator.gate.http
    fence = {"pipeline": operator.pipeline, "operation": "evil", "generation": operator.generation + 1}
    push = operator.headers(Scope.PUSH, generation=operator.generation + 1, operation="evil")
    neighbour = operator.headers(audience=["pod-neighbour"], generation=operator.generation + 1, operation="evil")
    # The public key taken for the secret of a symmetric algorithm, and a token without any.
    symmetric = forged("HS256", public(KEY), operator, fence)
    unsigned = forged("none", "", operator, fence)
    for headers, status in ((push, 403), (neighbour, 401), (symmetric, 401), (unsigned, 401)):
        answer = http.post("/v1/fence", json=fence, headers=headers)
        assert answer.status_code == status, answer.text
    assert operator.status()["fence"]["operation"] != "evil"


def forged(algorithm: str, secret: str, operator: Operator, fence: dict[str, object]) -> dict[str, str]:
    """A token that names the right key id and another algorithm."""

    def part(value: object) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    now = int(time.time())
    claims = {
        "iss": "rlfleet",
        "aud": [operator.gate.pod_uid],
        "sub": fence["pipeline"],
        "op": fence["operation"],
        "gen": fence["generation"],
        "scope": "control",
        "iat": now,
        "exp": now + 60,
    }
    head = part({"alg": algorithm, "typ": "JWT", "kid": KID}) + b"." + part(claims)
    mac = hmac.new(secret.encode(), head, hashlib.sha256).digest() if secret else b""
    return {"Authorization": f"Bearer {(head + b'.' + base64.urlsafe_b64encode(mac).rstrip(b'=')).decode()}"}
