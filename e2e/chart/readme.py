"""The chart's README: one table row per value, from values.yaml (meaning, default) and values.schema.json (type).

Invariant: a value without a comment, or one that the schema does not know, is an error, so no value goes undocumented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "rlfleet"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w-]*):")

_HEAD = """\
<!-- Generated from values.yaml and values.schema.json by `make generate`; do not edit. -->

# rlfleet

{description}. Kubernetes {kube}, Helm 3.14 or later.

    helm install rlfleet charts/rlfleet --namespace rlfleet-system --create-namespace
    helm test rlfleet --namespace rlfleet-system
    helm uninstall rlfleet --namespace rlfleet-system

- **CRDs** are installed with the first release and stay at `helm uninstall`, with all objects. Helm does not upgrade
  them: `crds.upgrade.enabled`, or `rlfleet crds | kubectl apply --server-side --force-conflicts -f -` before
  `helm upgrade` (without that flag a changed field is refused: Helm is the one who wrote it).
- **Uninstall** stops the operator and takes its finalizers off all objects first (`uninstall.*`). Engines keep what
  they have; delete pipelines and pools before if you want them closed.
- **The signing key** is made by the operator at its first start. It is in no template and in no release record of Helm.
- **Without cluster rights**: `watchNamespaces` with `rbac.aggregate: false` and `admissionPolicy.enabled: false`. Only
  the CRDs need an administrator then, and whoever may create SyncRounds in a namespace may do so for all its pipelines.
- **Without Helm**: `kubectl apply --server-side -k config/default` (the defaults, in namespace rlfleet-system).
- **With `helm upgrade --reuse-values`** values that are new in this release have no default; use
  `--reset-then-reuse-values`.

## Values

| value | type | default | meaning |
|---|---|---|---|
"""


class UndocumentedError(Exception):
    """values.yaml and its schema do not say enough of a value."""


@dataclass(frozen=True)
class Value:
    """One value that a user can set."""

    path: str
    type: str
    default: str
    meaning: str


def comments(text: str) -> dict[str, str]:
    """Path of each key of a values file -> the comment right above it."""
    found: dict[str, str] = {}
    block: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            block.append(line.strip().lstrip("#").strip())
            continue
        key = _KEY.match(line)
        if key:
            depth = len(key["indent"])
            parents = [*(p for p in parents if p[0] < depth), (depth, key["key"])]
            if block:
                found[".".join(name for _, name in parents)] = " ".join(block)
        block = []
    return found


def values(text: str, schema: Mapping[str, Any]) -> list[Value]:
    """All values in the file's order. Raises UndocumentedError."""
    meanings = comments(text)
    found = []
    for path, default, form in _leaves(yaml.safe_load(text), schema, ""):
        if path not in meanings:
            raise UndocumentedError(f"values.yaml: {path} has no comment")
        found.append(Value(path, _type(form), json.dumps(default), meanings[path]))
    return found


def _leaves(node: Any, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """What the schema says no more about than a type, with its default."""
    known = schema["properties"]
    if missing := sorted(set(known) - set(node) - {"global"}):
        raise UndocumentedError(f"values.yaml lacks {', '.join(path + name for name in missing)}")
    for name, default in node.items():
        if name not in known:
            raise UndocumentedError(f"values.schema.json lacks {path}{name}")
        # Resources and the like have a form that Kubernetes documents: one row.
        if known[name].get("properties") and isinstance(default, dict) and "requests" not in known[name]["properties"]:
            yield from _leaves(default, known[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", default, known[name]


def _type(form: Mapping[str, Any]) -> str:
    if "enum" in form:
        return " or ".join(str(word) for word in form["enum"])
    if "anyOf" in form:
        return " or ".join(_type(one) for one in form["anyOf"])
    kind = form["type"]
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def page() -> str:
    """The whole README."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    rows = values((CHART / "values.yaml").read_text(), schema)
    text = _HEAD.format(description=chart["description"], kube=chart["kubeVersion"].removesuffix("-0"))
    for row in rows:
        cells = (f"`{row.path}`", row.type, f"`{row.default}`", row.meaning)
        text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return text
