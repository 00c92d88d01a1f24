"""The pod's own readiness as the router: pools whose requests come through a Service.

There is no list to write: EndpointSlices follow the Ready condition of pods, and a pod with our readiness gate is Ready
only while its condition ``rlfleet.dev/weights-current`` is True. Invariant: the condition is applied to one pod by UID,
and under a field manager of its own, so neither another pod of the name nor kubelet's conditions are ever touched.
"""

from __future__ import annotations

from typing import Any

from rlfleet.api import labels
from rlfleet.plan.readiness import Readiness


def pod_condition(namespace: str, wanted: Readiness, now: str) -> dict[str, Any]:
    """What is applied to the pod's status. ``now``: RFC 3339, the time of this transition."""
    return {
        "metadata": {"name": wanted.name, "namespace": namespace, "uid": wanted.uid},
        "status": {
            "conditions": [
                {
                    "type": labels.WEIGHTS_CURRENT,
                    "status": "True" if wanted.current else "False",
                    "reason": wanted.reason,
                    "message": wanted.message[:1024],
                    "lastTransitionTime": now,
                }
            ]
        },
    }
