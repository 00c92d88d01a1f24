"""The kustomize base: what the chart renders with its defaults, for people who apply manifests.

Invariant: it is made from the chart and never edited, so both install the same. Labels that say "Helm" are left out,
and hooks: there is nobody who would run them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from e2e.chart.readme import CHART
from e2e.cluster.programs import KUBERNETES_VERSION, ensure_programs
from rlfleet.api import crdgen

FOLDER = "config/default"
NAMESPACE = "rlfleet-system"
_HEADER = "# Generated from charts/rlfleet by `make generate`; do not edit.\n"
_HELMS = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def render(*arguments: str, release: str = "rlfleet", namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """The objects that the chart renders. Raises CalledProcessError, with helm's words in ``stderr``."""
    return [o for o in yaml.safe_load_all(render_text(*arguments, release=release, namespace=namespace)) if o]


def render_text(*arguments: str, release: str = "rlfleet", namespace: str = NAMESPACE) -> str:
    """The same as text."""
    helm = ensure_programs(["helm"], say=lambda line: print(line, flush=True))["helm"]
    command = [str(helm), "template", release, str(CHART), f"--namespace={namespace}"]
    done = subprocess.run(
        [*command, f"--kube-version={KUBERNETES_VERSION}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def files() -> dict[str, str]:
    """Path below the repository's root -> content."""
    objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, *render("--no-hooks")]
    for obj in objects:
        _strip(obj)
    install = _HEADER + "".join(
        "---\n" + yaml.safe_dump(obj, sort_keys=False, width=116, allow_unicode=True) for obj in objects
    )
    return {
        f"{FOLDER}/install.yaml": install,
        f"{FOLDER}/kustomization.yaml": _kustomization("../../crds", "install.yaml"),
        # kustomize reads no file above its own folder, but a base there.
        "crds/kustomization.yaml": _kustomization(*sorted(kind.file for kind in crdgen.KINDS)),
    }


def _kustomization(*resources: str) -> str:
    body = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": [*resources]}
    return _HEADER + yaml.safe_dump(body, sort_keys=False)


def _strip(obj: dict[str, Any]) -> None:
    """Takes labels of Helm off an object and its pod template."""
    for metadata in (obj["metadata"], (obj.get("spec") or {}).get("template", {}).get("metadata", {})):
        for label in _HELMS:
            (metadata.get("labels") or {}).pop(label, None)


def root() -> Path:
    """The repository's root."""
    return CHART.parents[1]
