"""Tokens: what was signed is what is read, and everything else is refused with a reason that gives nothing away."""

from __future__ import annotations

import base64
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import tokens
from rlfleet.api.tokens import Claims, PublicKeys, Scope, TokenError, sign, verify

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def text(key: Ed25519PrivateKey) -> str:
    return base64.b64encode(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


KEYS = PublicKeys({"k1": text(KEY)})


def token(
    key: Ed25519PrivateKey = KEY,
    kid: str = "k1",
    audience: tuple[str, ...] = ("pod-1",),
    age: int = 0,
    scope: Scope = Scope.CONTROL,
    generation: int = 7,
) -> str:
    return sign(
        key,
        kid,
        audience=audience,
        scope=scope,
        pipeline="p",
        operation="o",
        generation=generation,
        issued_at=int(time.time()) - age,
    )


@given(
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=5, unique=True),
    st.sampled_from(Scope),
    st.integers(0, 2**63 - 1),
)
def test_what_was_signed_is_what_is_read(audience: list[str], scope: Scope, generation: int) -> None:
    made = token(audience=tuple(audience), scope=scope, generation=generation)
    for pod in audience:
        assert verify(made, KEYS, audience=pod) == Claims(scope, "p", "o", generation, tuple(audience))


def test_a_token_is_for_its_audience_only() -> None:
    with pytest.raises(TokenError, match="InvalidAudienceError"):
        verify(token(), KEYS, audience="pod-2")


def test_clocks_may_differ_a_little_and_no_more() -> None:
    almost = tokens.CONTROL_TTL_SECONDS + tokens.LEEWAY_SECONDS // 2
    assert verify(token(age=almost), KEYS, audience="pod-1").generation == 7
    with pytest.raises(TokenError, match="ExpiredSignatureError"):
        verify(token(age=tokens.CONTROL_TTL_SECONDS + tokens.LEEWAY_SECONDS + 5), KEYS, audience="pod-1")
    with pytest.raises(TokenError, match="ImmatureSignatureError"):
        verify(token(age=-tokens.LEEWAY_SECONDS - 60), KEYS, audience="pod-1")


def test_another_key_under_a_known_id_is_refused() -> None:
    with pytest.raises(TokenError, match="InvalidSignatureError"):
        verify(token(key=OTHER), KEYS, audience="pod-1")


def test_an_unknown_key_id_is_refused_even_with_a_good_signature() -> None:
    with pytest.raises(TokenError, match="unknown key id"):
        verify(token(kid="k2"), KEYS, audience="pod-1")


def test_rotation_accepts_both_keys() -> None:
    both = PublicKeys({"k1": text(KEY), "k2": text(OTHER)})
    assert verify(token(), both, audience="pod-1") == verify(token(key=OTHER, kid="k2"), both, audience="pod-1")


def forged(**changes: object) -> str:
    now = int(time.time())
    claims: dict[str, object] = {
        "iss": "rlfleet",
        "aud": ["pod-1"],
        "sub": "p",
        "op": "o",
        "gen": 7,
        "scope": "control",
        "iat": now,
        "exp": now + 60,
    }
    claims |= changes
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, KEY, algorithm="EdDSA", headers={"kid": "k1"})


def test_the_forgery_itself_is_good() -> None:
    assert verify(forged(), KEYS, audience="pod-1").generation == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "somebody"},
        {"exp": None},
        {"iat": None},
        {"aud": None},
        {"sub": None},
        {"op": None},
        {"gen": None},
        {"gen": "7"},
        {"gen": True},
        {"gen": -1},
        {"gen": 7.5},
        {"scope": "admin"},
        {"scope": None},
    ],
    ids=str,
)
def test_a_token_that_lacks_something_is_refused_though_its_signature_holds(changes: dict[str, object]) -> None:
    with pytest.raises(TokenError):
        verify(forged(**changes), KEYS, audience="pod-1")


def test_other_algorithms_are_refused() -> None:
    # The classic confusion: the public key, which everybody knows, used as the secret of a symmetric algorithm.
    claims = {"iss": "rlfleet", "aud": ["pod-1"], "sub": "p", "exp": int(time.time()) + 60, "iat": int(time.time())}
    for made in (
        jwt.encode(claims, text(KEY), algorithm="HS256", headers={"kid": "k1"}),
        jwt.encode(claims, None, algorithm="none", headers={"kid": "k1"}),
    ):
        with pytest.raises(TokenError, match="InvalidAlgorithmError"):
            verify(made, KEYS, audience="pod-1")


@given(st.text(max_size=60))
def test_garbage_is_refused_and_not_repeated(garbage: str) -> None:
    with pytest.raises(TokenError) as refused:
        verify(garbage, KEYS, audience="pod-1")
    assert len(garbage) < 8 or garbage not in str(refused.value)


def test_a_changed_claim_breaks_the_signature() -> None:
    header, body, signature = token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["gen"] += 1
    changed = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    with pytest.raises(TokenError, match="InvalidSignatureError"):
        verify(f"{header}.{changed}.{signature}", KEYS, audience="pod-1")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("", "not JSON"),
        ("[]", "non-empty JSON object"),
        ("{}", "non-empty JSON object"),
        ('{"k": 1}', "non-empty JSON object"),
        ('{"k": "!"}', "'k' is not a base64 Ed25519 key"),
        ('{"k": "AAAA"}', "'k' is not a base64 Ed25519 key of 32 bytes"),
    ],
)
def test_bad_public_keys_are_refused_at_start(given: str, fault: str) -> None:
    with pytest.raises(TokenError, match=fault):
        PublicKeys.from_json(given)


def test_public_keys_keep_their_text_and_contain_no_private_part() -> None:
    keys = PublicKeys.from_json(json.dumps({"k1": text(KEY)}))
    assert keys.as_text() == {"k1": text(KEY)}
    assert (list(keys), len(keys)) == (["k1"], 1)
    private = base64.b64encode(KEY.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())).decode()
    assert private not in json.dumps(keys.as_text())
