"""`helm test`: an installed operator leads and answers, and the CRDs refuse what they should.

Invariant: what is made is deleted again, whatever the verdict, and nothing else is: a pipeline of the test's name that
the test did not make is somebody's, and stays.
"""

from __future__ import annotations

import time
from typing import Any

from rlfleet.api.conditions import PipelineCondition
from rlfleet.app.hooks.steps import CALL_SECONDS, HookError, say, until
from rlfleet.kube.client import KubeClient, Obj
from rlfleet.kube.errors import AlreadyExists, Invalid, NotFound
from rlfleet.kube.resources import RLPIPELINES

#: No pod bears it, so nothing but a condition can come of the pipeline.
_SELECTOR = {"matchLabels": {"rlfleet.dev/helm-test": "no-such-pod"}}
_WRONG_MODE = "Telepathy"


async def check(kube: KubeClient, namespace: str, name: str, *, seconds: float) -> None:
    """Raises HookError with what is missing, ApiError."""
    await _refused(kube, namespace, name)
    await _remove(kube, namespace, name)  # left by a test that was cut short
    began = time.monotonic()
    try:
        made = await kube.create(RLPIPELINES, namespace, _pipeline(name), timeout=CALL_SECONDS)
    except AlreadyExists as e:
        raise HookError(f"RLPipeline {namespace}/{name} is still being deleted: no operator serves {namespace}") from e
    try:
        if (made["spec"].get("transport") or {}).get("mode") != "CPUSerialize":
            raise HookError(
                "the CRDs are not those of this release: a default is missing (kubectl apply the chart's crds/)"
            )

        async def answer() -> Obj | None:
            live = await kube.get(RLPIPELINES, namespace, name, timeout=CALL_SECONDS)
            return next(
                (
                    c
                    for c in (live.get("status") or {}).get("conditions") or []
                    if c["type"] == PipelineCondition.SENDER_READY
                ),
                None,
            )

        condition = await until(answer, seconds)
        if condition is None:
            raise HookError(
                f"no operator said anything about RLPipeline {namespace}/{name} within {seconds:g} s: look at the log "
                "of the one that holds the Lease"
            )
        say(
            f"answered after {time.monotonic() - began:.1f} s: {condition['type']} is {condition['status']}, "
            f"{condition['reason']}"
        )
    finally:
        await _remove(kube, namespace, name)
    say("ok")


def _pipeline(name: str, **transport: Any) -> Obj:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "rlfleet"}},
        "spec": {"weights": {"sender": {"podSelector": _SELECTOR}}, **({"transport": transport} if transport else {})},
    }


async def _refused(kube: KubeClient, namespace: str, name: str) -> None:
    """The CRDs' own validation is at work."""
    try:
        await kube.create(RLPIPELINES, namespace, _pipeline(name, mode=_WRONG_MODE), timeout=CALL_SECONDS)
    except Invalid:
        return
    except NotFound as e:
        raise HookError("the CRDs are not installed: kubectl apply the chart's crds/") from e
    except AlreadyExists:
        pass  # found out after validation only: the mode was accepted
    await _remove(kube, namespace, name)
    raise HookError(f"spec.transport.mode {_WRONG_MODE} was accepted: the CRDs are not those of this release")


def is_the_tests(pipeline: Obj) -> bool:
    """Whether this test, or an earlier one that was cut short, made the pipeline: nobody else selects such a sender."""
    sender = ((pipeline.get("spec") or {}).get("weights") or {}).get("sender") or {}
    return bool(sender.get("podSelector") == _SELECTOR)


async def _remove(kube: KubeClient, namespace: str, name: str) -> None:
    async def gone() -> bool:
        try:
            live = await kube.get(RLPIPELINES, namespace, name, timeout=CALL_SECONDS)
            if not is_the_tests(live):
                raise HookError(
                    f"RLPipeline {namespace}/{name} was not made by this test, so it is left alone; the test needs "
                    "that name (fullnameOverride changes it)"
                )
            if "deletionTimestamp" not in live["metadata"]:
                await kube.delete(RLPIPELINES, namespace, name, uid=live["metadata"]["uid"], timeout=CALL_SECONDS)
        except NotFound:
            return True
        return False

    if not await until(gone, 30.0):
        raise HookError(f"RLPipeline {namespace}/{name} does not end: no operator serves {namespace}")
