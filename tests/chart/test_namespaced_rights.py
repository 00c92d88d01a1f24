"""With namespaces named, the operator has in each of them what its ClusterRole would give, and nothing besides.

What the ClusterRole gives is compared with what the operator asks for in e2e/scenarios/test_rights.py.
"""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.local import ROOT
from e2e.scenarios.test_rights import UNUSED
from tests.chart.kit import Obj, chart, one

#: Rights on what belongs to no namespace.
CLUSTER = ("customresourcedefinitions", "resourceslices")


def rights(rules: list[Obj]) -> set[tuple[str, str, str]]:
    return {(v, g, r) for rule in rules for v in rule["verbs"] for g in rule["apiGroups"] for r in rule["resources"]}


def test_roles_in_named_namespaces_are_the_clusterrole_without_the_cluster(tmp_path: Path) -> None:
    everywhere = rights(one(chart(tmp_path), "ClusterRole", "rlfleet-operator")["rules"])
    named = chart(tmp_path, {"watchNamespaces": ["team-a", "team-b"]})
    roles = [o for o in named if o["kind"] == "Role" and o["metadata"]["namespace"] != "rlfleet-system"]
    engines = [r for r in roles if r["metadata"]["name"] == "rlfleet-engines"]
    assert [r["metadata"]["namespace"] for r in engines] == ["team-a", "team-b"]
    for role in engines:
        assert rights(role["rules"]) == {right for right in everywhere if right[2] not in CLUSTER}


def test_the_guide_names_what_is_granted_and_seldom_used() -> None:
    page = (ROOT / "docs/guides/security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{verb}` | `{resource}` | {why} |" for (verb, resource), why in UNUSED.items()]
