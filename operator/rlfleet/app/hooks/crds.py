"""Brings the installed CRDs to this release: what `helm upgrade` leaves undone.

Invariants: a CRD is replaced as it was read (resourceVersion), never created and never deleted; a version that objects
are stored in is never taken away. Replaced, not applied: a schema's field that this release no longer has would stay,
because whoever installed the CRD owns it.
"""

from __future__ import annotations

from typing import Any, Final

from rlfleet.api import crdgen
from rlfleet.app.hooks.steps import CALL_SECONDS, HookError, say, until
from rlfleet.kube.client import KubeClient, Obj
from rlfleet.kube.errors import Conflict, NotFound
from rlfleet.kube.resources import Resource

CRDS: Final = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
_ESTABLISHED_SECONDS: Final = 60.0


def merged(live: Obj, wanted: Obj) -> Obj:
    """``live`` as this release wants it: our spec, our labels and annotations added to those of others.

    Raises HookError where objects are stored in a version that this release does not know.
    """
    name = live["metadata"]["name"]
    ours = {v["name"] for v in wanted["spec"]["versions"]}
    stored = set((live.get("status") or {}).get("storedVersions") or [])
    if stored - ours:
        raise HookError(
            f"CRD {name}: objects are stored as {', '.join(sorted(stored - ours))}, which this release does not serve; "
            "upgrade to a release that serves both first"
        )
    metadata: dict[str, Any] = dict(live["metadata"])
    for field in ("labels", "annotations"):
        if both := {**(metadata.get(field) or {}), **(wanted["metadata"].get(field) or {})}:
            metadata[field] = both
    spec = dict(wanted["spec"])
    # What the apiserver defaults: left out it would count as a change.
    spec.setdefault("conversion", live["spec"].get("conversion") or {"strategy": "None"})
    return {**live, "metadata": metadata, "spec": spec}


async def upgrade(kube: KubeClient) -> None:
    """Replace each of our CRDs, and wait until all are served. Raises HookError, ApiError."""
    for kind in crdgen.KINDS:
        wanted = crdgen.crd(kind)
        name = wanted["metadata"]["name"]

        async def write(name: str = name, wanted: Obj = wanted) -> bool:
            live = await kube.get(CRDS, None, name, timeout=CALL_SECONDS)
            body = merged(live, wanted)
            try:
                changed = await kube.replace(CRDS, None, name, body, timeout=CALL_SECONDS)
            except Conflict:
                return False
            same = changed["metadata"].get("generation") == live["metadata"].get("generation")
            say(f"CRD {name}: {'as it should be' if same else 'upgraded'}")
            return True

        async def served(name: str = name) -> bool:
            live = await kube.get(CRDS, None, name, timeout=CALL_SECONDS)
            conditions = {c["type"]: c["status"] for c in (live.get("status") or {}).get("conditions") or []}
            return conditions.get("Established") == "True" and conditions.get("NamesAccepted") == "True"

        try:
            written = await until(write, _ESTABLISHED_SECONDS)
        except NotFound as e:
            raise HookError(
                f"CRD {name} is not installed: apply the chart's crds/ (this job may change CRDs, not create them)"
            ) from e
        if not written:
            raise HookError(f"CRD {name}: somebody else keeps changing it; look at its managedFields")
        if not await until(served, _ESTABLISHED_SECONDS):
            raise HookError(f"CRD {name} is not served; kubectl describe crd {name} says why")
