"""The operator's signing keys: Ed25519 pairs in a Secret of the operator's namespace.

Invariants:
- the private half leaves the Secret only into this process's memory; pods get public halves;
- two operators that start together end up with the same key: whoever loses the create reads what won;
- a key that is being replaced signs on while the Secret still names it, so that everybody is told its successor first;
  after that it signs only where its successor is not known yet, and nobody is told to accept it any more.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from rlfleet.api import tokens
from rlfleet.api.tokens import Scope
from rlfleet.kube.client import KubeClient, Obj
from rlfleet.kube.errors import AlreadyExists, NotFound
from rlfleet.kube.resources import SECRETS

SECRET_NAME = "rlfleet-signing-key"
PRIVATE_FIELD = "ed25519.seed"
#: The key before, while a rotation lasts.
PREVIOUS_FIELD = "ed25519.previous"


class SigningKeyError(Exception):
    """The Secret does not hold a usable key."""


class SigningKey:
    """One key pair. Tokens are dated by ``wall_seconds``."""

    def __init__(self, seed: bytes, wall_seconds: Callable[[], float], field: str = PRIVATE_FIELD) -> None:
        if len(seed) != 32:
            raise SigningKeyError(f"signing key: field {field} must be 32 bytes, has {len(seed)}")
        self._wall_seconds = wall_seconds
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public = base64.b64encode(public).decode()
        self.kid = hashlib.sha256(public).hexdigest()[:16]

    def sign(
        self,
        *,
        audience: Iterable[str],
        scope: Scope,
        pipeline: str,
        operation: str,
        generation: int,
        ttl_seconds: int = tokens.CONTROL_TTL_SECONDS,
    ) -> str:
        """A token issued now; ``audience`` are pod UIDs. See api/tokens.py."""
        return tokens.sign(
            self._key,
            self.kid,
            audience=audience,
            scope=scope,
            pipeline=pipeline,
            operation=operation,
            generation=generation,
            issued_at=int(self._wall_seconds()),
            ttl_seconds=ttl_seconds,
        )


class SigningKeys:
    """The key that signs, and the one before it; see api/tokens.py for what tokens say."""

    def __init__(
        self, seed: bytes, *, previous: bytes | None = None, wall_seconds: Callable[[], float] = time.time
    ) -> None:
        self.current = SigningKey(seed, wall_seconds)
        self.previous = SigningKey(previous, wall_seconds, PREVIOUS_FIELD) if previous is not None else None
        self._published = [self.current] if self.previous is None else [self.current, self.previous]

    @classmethod
    async def find(
        cls, kube: KubeClient, namespace: str, name: str = SECRET_NAME, *, timeout: float = 10.0
    ) -> SigningKeys | None:
        """Read the keys from the Secret ``name``; None if there is none yet. Writes nothing."""
        try:
            return cls._reading(kube, await kube.get(SECRETS, namespace, name, timeout=timeout))
        except NotFound:
            return None

    @classmethod
    async def load(
        cls, kube: KubeClient, namespace: str, name: str = SECRET_NAME, *, timeout: float = 10.0
    ) -> SigningKeys:
        """Read the keys from the Secret ``name``, creating it if there is none."""
        if (found := await cls.find(kube, namespace, name, timeout=timeout)) is not None:
            return found
        seed = Ed25519PrivateKey.generate().private_bytes_raw()
        body: Obj = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {"app.kubernetes.io/managed-by": "rlfleet"},
            },
            "type": "Opaque",
            "data": {PRIVATE_FIELD: base64.b64encode(seed).decode()},
        }
        try:
            return cls._reading(kube, await kube.create(SECRETS, namespace, body, timeout=timeout))
        except AlreadyExists:
            return cls._reading(kube, await kube.get(SECRETS, namespace, name, timeout=timeout))

    @classmethod
    def _reading(cls, kube: KubeClient, secret: Obj) -> SigningKeys:
        """Tokens are dated by the apiserver's clock, which nodes follow more closely than this machine's may."""
        return cls(
            _seed(secret, PRIVATE_FIELD),
            previous=_seed(secret, PREVIOUS_FIELD) if PREVIOUS_FIELD in (secret.get("data") or {}) else None,
            wall_seconds=lambda: (kube.now_ms or time.time_ns() // 1_000_000) / 1000,
        )

    def adopt(self, found: SigningKeys) -> bool:
        """Go on with what the Secret holds now; True if that changed anything.

        A key that was replaced without being named as the previous one still signs what its successor is told with (no
        gate would believe anything else), but nobody is told to accept it any more.
        """
        if found.public_text() == self.public_text() and found.current.kid == self.current.kid:
            return False
        replaced = self.current if found.current.kid != self.current.kid else self.previous
        self.current, self._published = found.current, found._published
        self.previous = found.previous or replaced
        return True

    @property
    def order(self) -> tuple[SigningKey, SigningKey | None]:
        """The key to sign with, and the one to try where that is not known."""
        if self.previous is not None and self.previous in self._published:
            return self.previous, self.current
        return self.current, self.previous

    def public_text(self) -> dict[str, str]:
        """Key id -> base64 of the raw public key: what gates and senders verify with."""
        return {key.kid: key.public for key in self._published}


def _seed(secret: Obj, field: str) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {})[field], validate=True)
    except (KeyError, ValueError) as e:
        name = secret["metadata"]["name"]
        remedy = "delete it to get a new key" if field == PRIVATE_FIELD else "remove the field, or write the key before"
        raise SigningKeyError(f"Secret {name} has no readable field {field}; {remedy}") from e
