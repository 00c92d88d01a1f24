"""Repair rules are isolated: against the real apiserver, with a service account that may not do all that they need."""

from __future__ import annotations

import base64
import json
import ssl
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.local import LocalCluster
from rlfleet.api import labels
from rlfleet.app.metrics import OperatorMetrics
from rlfleet.control.context import Clock, Context, SystemClock
from rlfleet.control.keys import SigningKeys
from rlfleet.control.peers import Peers
from rlfleet.control.pipeline import reconcile_pipeline
from rlfleet.control.queue import Retry
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import Credentials, CredentialSource, credential_source, load
from rlfleet.kube.events import EventRecorder
from rlfleet.kube.guard import Guard
from rlfleet.kube.reflector import Reflector
from rlfleet.kube.resources import PODS
from tests.fault.proxy import RETRY_AFTER_SECONDS, Fault, FaultProxy, Rule

pytestmark = pytest.mark.cluster

LONG_AGO = "2020-01-01T00:00:00Z"
READ = {"apiGroups": ["", labels.GROUP], "resources": ["*"], "verbs": ["get", "list", "watch"]}
STATUS = {"apiGroups": [labels.GROUP], "resources": ["rlpipelines/status", "syncrounds/status"], "verbs": ["patch"]}
PATCH = {"apiGroups": [labels.GROUP], "resources": ["syncrounds"], "verbs": ["patch"]}
DELETE = {"apiGroups": [labels.GROUP], "resources": ["syncrounds"], "verbs": ["delete"]}

Reconcile = Callable[[list[dict[str, Any]]], AbstractAsyncContextManager[tuple[Context, OperatorMetrics]]]


@pytest.fixture
async def allowed(cluster: LocalCluster, namespace: str) -> Reconcile:
    """A context of a reconciler whose service account may do only what the rules of a Role say."""
    admin = await load(str(cluster.kubeconfig))

    @asynccontextmanager
    async def make(rules: list[dict[str, Any]]) -> AsyncIterator[tuple[Context, OperatorMetrics]]:
        name = f"weak-{uuid.uuid4().hex[:6]}"
        meta = {"name": name, "namespace": namespace}
        cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
        rbac = "rbac.authorization.k8s.io"
        cluster.apply({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules})
        cluster.apply(
            {
                "apiVersion": f"{rbac}/v1",
                "kind": "RoleBinding",
                "metadata": meta,
                "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            }
        )
        token = cluster.kubectl("create", "token", name, f"--namespace={namespace}").strip()
        tls = trust_only(cluster)

        async def source() -> Credentials:
            return replace(admin, tls=tls, authorization=f"Bearer {token}")

        async with context(source, namespace, SystemClock()) as made:
            yield made

    return make


@asynccontextmanager
async def context(
    source: CredentialSource, namespace: str, clock: Clock
) -> AsyncIterator[tuple[Context, OperatorMetrics]]:
    """What a reconciler works with, under these credentials."""
    keys = SigningKeys(b"k" * 32)
    metrics = OperatorMetrics()
    async with KubeClient(source) as kube:
        guard = Guard.unelected()
        peers = Peers(keys, guard)
        yield (
            Context(
                kube=kube,
                pods=Reflector(kube, PODS, namespaces=(namespace,)),
                peers=peers,
                guard=guard,
                keys=keys,
                events=EventRecorder(kube, instance="test"),
                enqueue=lambda key, **_: None,
                clock=clock,
                metrics=metrics,
            ),
            metrics,
        )
        await peers.close()


def trust_only(cluster: LocalCluster) -> ssl.SSLContext:
    """TLS that trusts the cluster and shows no certificate of its own."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    entry = config["clusters"][0]["cluster"]
    if "certificate-authority" in entry:
        return ssl.create_default_context(cafile=entry["certificate-authority"])
    return ssl.create_default_context(cadata=base64.b64decode(entry["certificate-authority-data"]).decode())


@pytest.fixture
def history(cluster: LocalCluster, namespace: str) -> Callable[[], dict[str, list[str]]]:
    """A pipeline with two rounds that ended long ago, one of which still holds on to our finalizer."""
    cluster.apply(
        {
            "apiVersion": labels.API_VERSION,
            "kind": "RLPipeline",
            "metadata": {"name": "p", "namespace": namespace},
            "spec": {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}},
        }
    )
    for name, finalizers, generation in (("old", [], 1), ("held", [labels.ROUND_FINALIZER], 2)):
        cluster.apply(
            {
                "apiVersion": labels.API_VERSION,
                "kind": "SyncRound",
                "metadata": {"name": name, "namespace": namespace, "finalizers": finalizers},
                "spec": {"pipeline": "p", "version": generation, "senderIncarnation": "s"},
            }
        )
        status = {
            "phase": "Succeeded", "outcome": "Succeeded", "finishedAt": LONG_AGO,
            "lease": {"holder": "h", "generation": generation, "acquiredAt": LONG_AGO, "renewedAt": LONG_AGO},
        }  # fmt: skip
        cluster.kubectl(
            "patch", "syncround", name, f"--namespace={namespace}", "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )  # fmt: skip

    def there() -> dict[str, list[str]]:
        items = cluster.get("syncrounds", f"--namespace={namespace}")["items"]
        return {i["metadata"]["name"]: i["metadata"].get("finalizers", []) for i in items}

    return there


def degraded(cluster: LocalCluster, namespace: str) -> dict[str, Any]:
    """The Degraded condition of the pipeline."""
    conditions = cluster.get("rlpipeline", "p", f"--namespace={namespace}")["status"]["conditions"]
    return next(c for c in conditions if c["type"] == "Degraded")


async def test_with_all_rights_all_rules_run(
    cluster: LocalCluster, namespace: str, allowed: Reconcile, history: Callable[[], dict[str, list[str]]]
) -> None:
    async with allowed([READ, STATUS, PATCH, DELETE]) as (ctx, metrics):
        await reconcile_pipeline(ctx, namespace, "p")
    assert history() == {"held": []}
    assert degraded(cluster, namespace)["status"] == "False"
    assert b"rlfleet_repair_rule_failures_total{" not in metrics.render()


@pytest.mark.parametrize(
    ("rights", "failing", "left"),
    [
        # the first rule fails: the last one still runs
        ([READ, STATUS, DELETE], "EndedRounds", {"held": [labels.ROUND_FINALIZER]}),
        # the last one fails: the first one has run
        ([READ, STATUS, PATCH], "History", {"held": [], "old": []}),
    ],
)
async def test_a_rule_that_raises_is_named_and_stops_no_other(
    cluster: LocalCluster,
    namespace: str,
    allowed: Reconcile,
    history: Callable[[], dict[str, list[str]]],
    rights: list[dict[str, Any]],
    failing: str,
    left: dict[str, list[str]],
) -> None:
    async with allowed(rights) as (ctx, metrics):
        for _ in range(2):
            with pytest.raises(Retry, match=failing):
                await reconcile_pipeline(ctx, namespace, "p")
        assert ctx.events.pending == 1, "the same sentence is written once"
    assert history() == left
    assert f'rlfleet_repair_rule_failures_total{{rule="{failing}"}} 2.0'.encode() in metrics.render()
    found = degraded(cluster, namespace)
    assert (found["status"], found["reason"]) == ("True", "RepairRuleFailed")
    assert failing in found["message"]


class Hands(SystemClock):
    """Loop time stands still until the test moves it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_a_rule_that_the_apiserver_throttled_rests_and_the_others_go_on(
    cluster: LocalCluster, namespace: str, tmp_path: Path, history: Callable[[], dict[str, list[str]]]
) -> None:
    """The rounds ended long ago, so the last rule wants to delete them in every reconcile."""

    def held() -> None:
        patch = json.dumps({"metadata": {"finalizers": [labels.ROUND_FINALIZER]}})
        cluster.kubectl("patch", "syncround", "held", f"--namespace={namespace}", "--type=merge", "-p", patch)

    clock = Hands()
    with FaultProxy(cluster.kubeconfig, tmp_path) as proxy:
        rule = proxy.strike(Rule(lambda call: call.method == "DELETE" and call.plural == "syncrounds", Fault.THROTTLED))
        async with context(credential_source(str(proxy.kubeconfig)), namespace, clock) as (ctx, metrics):
            for _ in range(3):
                with pytest.raises(Retry):
                    await reconcile_pipeline(ctx, namespace, "p")
                # Asked again it would succeed.
                assert (rule.struck, history()) == (1, {"held": [], "old": []}), "one goes on, the other one rests"
                held()
                clock.now += 0.4 * RETRY_AFTER_SECONDS
            await reconcile_pipeline(ctx, namespace, "p")
            assert history() == {"held": []}
            assert ctx.events.pending == 0
        assert b"rlfleet_repair_rule_failures_total{" not in metrics.render(), "nothing is wrong with the rule"
    assert degraded(cluster, namespace)["status"] == "False"
