"""The signing key: made once, read by whoever comes second, and what its tokens say."""

from __future__ import annotations

import asyncio
import base64

import pytest

from e2e.cluster.local import LocalCluster
from rlfleet.api.tokens import PublicKeys, Scope, TokenError, verify
from rlfleet.control.keys import SECRET_NAME, SigningKeyError, SigningKeys
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import credential_source
from rlfleet.kube.resources import SECRETS


@pytest.mark.cluster
async def test_operators_that_start_together_share_one_key(cluster: LocalCluster, namespace: str) -> None:
    async with KubeClient(credential_source(str(cluster.kubeconfig))) as kube:
        several = await asyncio.gather(*(SigningKeys.load(kube, namespace) for _ in range(4)))
        assert len({k.current.kid for k in several}) == 1
        again = await SigningKeys.load(kube, namespace)
        assert again.public_text() == several[0].public_text()
        secret = await kube.get(SECRETS, namespace, SECRET_NAME, timeout=60)
        assert next(iter(again.public_text().values())) not in base64.b64decode(
            next(iter(secret["data"].values()))
        ).decode("latin1")


@pytest.mark.cluster
async def test_secret_without_a_usable_key_is_refused_by_name(cluster: LocalCluster, namespace: str) -> None:
    async with KubeClient(credential_source(str(cluster.kubeconfig))) as kube:
        body = {"metadata": {"name": SECRET_NAME}, "stringData": {"other": "x"}}
        await kube.create(SECRETS, namespace, body, timeout=60)
        with pytest.raises(SigningKeyError, match=SECRET_NAME):
            await SigningKeys.load(kube, namespace)


def test_tokens_verify_with_the_public_half_and_only_for_their_audience() -> None:
    keys = SigningKeys(b"k" * 32)
    token = keys.current.sign(audience=["pod"], scope=Scope.CONTROL, pipeline="pl", operation="op", generation=4)
    public = PublicKeys(keys.public_text())
    claims = verify(token, public, audience="pod")
    assert (claims.scope, claims.pipeline, claims.operation, claims.generation) == (Scope.CONTROL, "pl", "op", 4)
    with pytest.raises(TokenError):
        verify(token, public, audience="another pod")
    with pytest.raises(TokenError):
        verify(token, PublicKeys(SigningKeys(b"x" * 32).public_text()), audience="pod")


def test_token_of_long_ago_is_expired() -> None:
    old = SigningKeys(b"k" * 32, wall_seconds=lambda: 1_000_000.0)
    token = old.current.sign(audience=["pod"], scope=Scope.READ, pipeline="pl", operation="", generation=0)
    with pytest.raises(TokenError, match="Expired"):
        verify(token, PublicKeys(old.public_text()), audience="pod")


def test_seed_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(SigningKeyError, match="32 bytes, has 5"):
        SigningKeys(b"short")
