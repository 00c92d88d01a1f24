"""Before `helm uninstall`: what nobody could do any more once the operator is gone.

Objects that are being deleted get their time to end in order; then the operator is stopped, for good, before its
finalizers are taken off (it would put them back); then the Lease and, if wanted, the signing key go.

Invariants: objects themselves, engines and pods are never deleted; every change is under the resourceVersion or UID of
what was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlfleet.app.hooks.steps import CALL_SECONDS, HookError, say, steadily, until
from rlfleet.kube.client import KubeClient, Obj
from rlfleet.kube.errors import Conflict, NotFound
from rlfleet.kube.resources import ENGINEPOOLS, LEASES, PODS, RLPIPELINES, SECRETS, SYNCROUNDS, Resource
from rlfleet.plan.deletion import FINALIZERS, holds_up

DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
#: Rounds before their pipelines, pools last: the order in which the operator would let go.
KINDS: Final = (SYNCROUNDS, RLPIPELINES, ENGINEPOOLS)
#: Seconds for the operator's pods to end after the Deployment is at zero, and for one pass over the finalizers.
_STOP_SECONDS: Final = 60.0
_PASS_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Release:
    """What is being uninstalled. ``secret`` empty: the signing key stays; ``namespaces`` empty: all."""

    namespace: str
    deployment: str
    lease: str
    secret: str
    namespaces: tuple[str, ...]


async def uninstall(kube: KubeClient, release: Release, *, drain_seconds: float) -> None:
    """The whole job. Raises HookError where finalizers are left, ApiError."""

    async def ending() -> bool:
        return not [o for res, o in await _objects(kube, release) if holds_up(o, FINALIZERS[res.plural])]

    if not await until(ending, drain_seconds):
        say(f"objects that are being deleted did not end within {drain_seconds:g} s; going on without")
    await _stop(kube, release)

    async def free() -> bool:
        left = 0
        for res, obj in await _objects(kube, release):
            left += not await _let_go(kube, res, obj)
        return left == 0

    if not await until(free, _PASS_SECONDS):
        raise HookError(
            "finalizers of rlfleet are left on some objects (kubectl get rlfleet -A); is another operator serving "
            "these namespaces?"
        )
    await _delete(kube, LEASES, release.namespace, release.lease)
    if release.secret:
        await _delete(kube, SECRETS, release.namespace, release.secret)


async def _objects(kube: KubeClient, release: Release) -> list[tuple[Resource, Obj]]:
    """All objects of ours in the namespaces that the release serves."""
    found = []
    for res in KINDS:
        for namespace in release.namespaces or (None,):
            try:
                listed = await kube.list(res, namespace, timeout=CALL_SECONDS)
            except NotFound:
                continue  # the CRD is gone, and all objects with it
            found += [(res, o) for o in listed.items]
    return found


async def _stop(kube: KubeClient, release: Release) -> None:
    """The Deployment at zero, and its pods gone."""
    try:
        deployment = await steadily(
            lambda: kube.get(DEPLOYMENTS, release.namespace, release.deployment, timeout=CALL_SECONDS)
        )
    except NotFound:
        say(f"Deployment {release.deployment} is gone already")
        return
    scale = {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {"name": release.deployment, "namespace": release.namespace},
        "spec": {"replicas": 0},
    }
    await steadily(
        lambda: kube.apply(
            DEPLOYMENTS, release.namespace, release.deployment, scale, timeout=CALL_SECONDS, subresource="scale"
        )
    )
    labels = deployment["spec"]["selector"]["matchLabels"]
    selector = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))

    async def gone() -> bool:
        pods = await kube.list(PODS, release.namespace, timeout=CALL_SECONDS, label_selector=selector)
        return not pods.items

    if not await until(gone, _STOP_SECONDS):
        raise HookError(
            f"the operator's pods did not end within {_STOP_SECONDS:g} s (kubectl get pods -n {release.namespace} "
            f"-l {selector}); if their node is gone, delete them with --force and uninstall again"
        )
    say("the operator has stopped")


async def _let_go(kube: KubeClient, res: Resource, obj: Obj) -> bool:
    """Our finalizer is off the object; False: somebody changed it, so it is to be read again."""
    meta, ours = obj["metadata"], FINALIZERS[res.plural]
    held = meta.get("finalizers") or []
    if ours not in held:
        return True
    try:
        await kube.patch_metadata(
            res,
            meta["namespace"],
            meta["name"],
            resource_version=meta["resourceVersion"],
            finalizers=[f for f in held if f != ours],
            timeout=CALL_SECONDS,
        )
    except NotFound:
        return True
    except Conflict:
        return False
    say(f"{res.kind} {meta['namespace']}/{meta['name']}: finalizer removed")
    return True


async def _delete(kube: KubeClient, res: Resource, namespace: str, name: str) -> None:
    """The object is gone. One that somebody made anew meanwhile is none of ours."""
    try:
        found = await steadily(lambda: kube.get(res, namespace, name, timeout=CALL_SECONDS))
        await steadily(lambda: kube.delete(res, namespace, name, uid=found["metadata"]["uid"], timeout=CALL_SECONDS))
    except (NotFound, Conflict):
        return
    say(f"{res.kind} {name} deleted")
