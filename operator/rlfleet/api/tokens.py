"""Short-lived signed tokens: who may call a gate or a sender, about which operation (DESIGN section 5, Keys).

Invariant: verification needs only public keys, so no engine or trainer pod holds anything with which it could drive
a gate. A token names one audience set, one pipeline, one operation, one generation and one scope.
JWT (RFC 7519) with EdDSA over Ed25519 (RFC 8037), by PyJWT.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM = "EdDSA"
ISSUER = "rlfleet"
#: Seconds that a control token lives; clocks may differ by LEEWAY_SECONDS.
CONTROL_TTL_SECONDS = 120
LEEWAY_SECONDS = 30


class Scope(StrEnum):
    """What a token allows."""

    READ = "read"  # status and operation records
    CONTROL = "control"  # everything that the operator does
    PUSH = "push"  # manifest and buckets of one round, nothing else


class TokenError(Exception):
    """The token is missing, malformed, expired, signed by an unknown key, or not meant for us."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The verified content of a token."""

    scope: Scope
    pipeline: str
    operation: str
    generation: int
    audience: tuple[str, ...]


class PublicKeys(Mapping[str, Ed25519PublicKey]):
    """Verification keys by key id (base64 of the raw 32 bytes in text form)."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._text = dict(keys)
        self._keys: dict[str, Ed25519PublicKey] = {}
        for kid, text in keys.items():
            try:
                self._keys[kid] = Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
            except Exception as e:
                raise TokenError(f"public key {kid!r} is not a base64 Ed25519 key of 32 bytes") from e

    @classmethod
    def from_json(cls, text: str) -> PublicKeys:
        """Parse ``{"kid": "base64"}`` as it stands in a pod's environment (RLFLEET_PUBLIC_KEYS)."""
        try:
            data = json.loads(text)
        except ValueError as e:
            raise TokenError("public keys are not JSON") from e
        if not isinstance(data, dict) or not data or not all(isinstance(v, str) for v in data.values()):
            raise TokenError('public keys must be a non-empty JSON object {"kid": "base64"}')
        return cls(data)

    def as_text(self) -> dict[str, str]:
        """The keys as given, for storing them."""
        return dict(self._text)

    def __getitem__(self, kid: str) -> Ed25519PublicKey:
        return self._keys[kid]

    def __iter__(self) -> Any:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def sign(
    key: Ed25519PrivateKey,
    kid: str,
    *,
    audience: Iterable[str],
    scope: Scope,
    pipeline: str,
    operation: str,
    generation: int,
    issued_at: int,
    ttl_seconds: int = CONTROL_TTL_SECONDS,
) -> str:
    """Make a token. ``issued_at`` in seconds since the epoch; ``audience`` are pod UIDs."""
    claims = {
        "iss": ISSUER,
        "aud": list(audience),
        "sub": pipeline,
        "op": operation,
        "gen": generation,
        "scope": scope.value,
        "iat": issued_at,
        "exp": issued_at + ttl_seconds,
    }
    return jwt.encode(claims, key, algorithm=ALGORITHM, headers={"kid": kid})


def verify(token: str, keys: PublicKeys, *, audience: str) -> Claims:
    """Check signature, issuer, audience and times; raise TokenError with a reason that is safe to show."""
    try:
        kid = jwt.get_unverified_header(token).get("kid")
        if not isinstance(kid, str) or kid not in keys:
            raise TokenError("token is signed by an unknown key id")
        data = jwt.decode(
            token,
            keys[kid],
            algorithms=[ALGORITHM],
            audience=audience,
            issuer=ISSUER,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iat", "aud", "iss", "sub"]},
        )
        generation = data["gen"]
        if not isinstance(generation, int) or isinstance(generation, bool) or generation < 0:
            raise TokenError("token has no valid generation")
        return Claims(
            scope=Scope(data["scope"]),
            pipeline=str(data["sub"]),
            operation=str(data["op"]),
            generation=generation,
            audience=tuple(data["aud"]),
        )
    except TokenError:
        raise
    except jwt.PyJWTError as e:
        raise TokenError(f"token refused: {type(e).__name__}") from e
    except (KeyError, ValueError, TypeError) as e:
        raise TokenError("token lacks a required claim") from e
