"""The demo with real engines: a policy learns from what SGLang, or vLLM, generates from the weights it was brought."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.scenarios.kit import ROOT

pytestmark = [
    pytest.mark.usefixtures("private_network"),
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_demo_keeps_its_promises_with_a_real_engine(engine: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "KEEP", "MAKEFLAGS")}
    # Inside of a namespace already, the demo makes none.
    done = subprocess.run(
        [sys.executable, "-m", "e2e.demo", f"--engine={engine}"],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(tmp_path), "DEMO_VERSIONS": "10", "DEMO_UNSYNCED_VERSIONS": "6"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert "DEMO OK" in done.stdout
    assert "FAIL" not in done.stdout
    assert not list(tmp_path.iterdir())
