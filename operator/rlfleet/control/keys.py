"""The operator's signing key: one Ed25519 pair in a Secret of the operator's namespace.

Invariants:
- the private half leaves the Secret only into this process's memory; pods get public halves;
- two operators that start together end up with the same key: whoever loses the create reads what won.
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


class SigningKeyError(Exception):
    """The Secret does not hold a usable key."""


class SigningKeys:
    """Signs control and push tokens; see api/tokens.py for what they say."""

    def __init__(self, seed: bytes, *, wall_seconds: Callable[[], float] = time.time) -> None:
        if len(seed) != 32:
            raise SigningKeyError(f"signing key: field {PRIVATE_FIELD} must be 32 bytes, has {len(seed)}")
        self._wall_seconds = wall_seconds
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._public = base64.b64encode(public).decode()
        self.kid = hashlib.sha256(public).hexdigest()[:16]

    @classmethod
    async def find(
        cls, kube: KubeClient, namespace: str, name: str = SECRET_NAME, *, timeout: float = 10.0
    ) -> SigningKeys | None:
        """Read the key from the Secret ``name``; None if there is none yet. Writes nothing."""
        try:
            return cls._reading(kube, _seed(await kube.get(SECRETS, namespace, name, timeout=timeout)))
        except NotFound:
            return None

    @classmethod
    async def load(
        cls, kube: KubeClient, namespace: str, name: str = SECRET_NAME, *, timeout: float = 10.0
    ) -> SigningKeys:
        """Read the key from the Secret ``name``, creating it if there is none."""
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
            return cls._reading(kube, _seed(await kube.create(SECRETS, namespace, body, timeout=timeout)))
        except AlreadyExists:
            return cls._reading(kube, _seed(await kube.get(SECRETS, namespace, name, timeout=timeout)))

    @classmethod
    def _reading(cls, kube: KubeClient, seed: bytes) -> SigningKeys:
        """Tokens are dated by the apiserver's clock, which nodes follow more closely than this machine's may."""
        return cls(seed, wall_seconds=lambda: (kube.now_ms or time.time_ns() // 1_000_000) / 1000)

    def public_text(self) -> dict[str, str]:
        """Key id -> base64 of the raw public key: what gates and senders verify with."""
        return {self.kid: self._public}

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


def _seed(secret: Obj) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {})[PRIVATE_FIELD], validate=True)
    except (KeyError, ValueError) as e:
        raise SigningKeyError(
            f"Secret {secret['metadata']['name']} has no readable field {PRIVATE_FIELD}; delete it to get a new key"
        ) from e
