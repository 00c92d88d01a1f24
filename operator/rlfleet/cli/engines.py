"""Which pods are engines: those that pools make, by their label, and those that pools adopt, by their selectors.

Invariant: the same rule as the operator's (plan.adopt); what no pool has is never taken for an engine.
"""

from __future__ import annotations

from rlfleet.api import labels
from rlfleet.cli.cluster import Cluster, Obj
from rlfleet.plan.adopt import adopted, adopts, is_home, selector_of


def engine_pods(cluster: Cluster) -> list[Obj]:
    """All engine pods in the cluster's namespace or namespaces, by namespace and name."""
    found = {p["metadata"]["uid"]: p for p in cluster.list("pods", selector=labels.POOL)}
    pools = cluster.list("enginepools")
    for pool in pools:
        if adopts(pool):
            text = ",".join(f"{k}={v}" for k, v in sorted(selector_of(pool).items()))
            pods = cluster.list("pods", selector=text, namespace=pool["metadata"]["namespace"])
            got = adopted(pool, pools, pods)
            found |= {p["metadata"]["uid"]: p for p in (*got.pods, *got.ended)}
    return sorted(found.values(), key=lambda p: (p["metadata"]["namespace"], p["metadata"]["name"]))


def is_engine(cluster: Cluster, pod: Obj) -> bool:
    """The pod is made or adopted by an EnginePool of its namespace."""
    if labels.POOL in (pod["metadata"].get("labels") or {}):
        return True
    return any(is_home(p, pod) for p in cluster.list("enginepools", namespace=pod["metadata"]["namespace"]))
