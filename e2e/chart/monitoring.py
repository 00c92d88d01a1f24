"""The published CRDs of Prometheus Operator, to validate what the chart makes for it.

They are taken from the operator's own Go module, whose checksum is pinned here: nothing of it is copied into this
repository, and what is downloaded is what was looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

MODULE = "github.com/prometheus-operator/prometheus-operator"
VERSION = "v0.92.1"
CHECKSUM = "h1:rHWuFo6SVya4FBSCNg2DCzyc4xAv54zk3eDTzp5mQZc="
KINDS = ("servicemonitors", "podmonitors", "prometheusrules")


def crd_files() -> list[Path]:
    """Files with the CRDs of KINDS, downloaded once (4.5 MB). Raises CalledProcessError, ValueError."""
    # The checksum below takes the place of the public checksum database, which may be out of reach.
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GONOSUMDB": MODULE, "GOWORK": "off"}
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer = json.loads(done.stdout)
    if answer["Sum"] != CHECKSUM:
        raise ValueError(f"{MODULE}@{VERSION} has checksum {answer['Sum']}, not {CHECKSUM}")
    folder = Path(answer["Dir"]) / "example/prometheus-operator-crd"
    return [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in KINDS]
