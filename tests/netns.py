"""Tests whose programs listen on every interface run once more, alone, in a network namespace of their own.

Invariant: outside of such a namespace none of these programs is started; where one cannot be made the test is skipped
and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "RLFLEET_PRIVATE_NETWORK"


def inside(request: pytest.FixtureRequest, tmp_path: Path, *, seconds: float) -> bool:
    """True in the namespace. Outside: run this very test there, pass on what it says, and answer False."""
    if os.environ.get(INSIDE):
        return True
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None:
        pytest.skip("needs unshare and ip to make a network namespace")
    tried = subprocess.run([unshare, "-n", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no network namespace can be made (root is needed): {tried.stderr.strip()}")
    again = [sys.executable, "-m", "pytest", request.node.nodeid, "-q", "-m", "", f"--basetemp={tmp_path / 'inside'}"]
    command = [unshare, "-n", "--", "sh", "-c", f'{ip} link set lo up && exec "$@"', "sh", *again]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {INSIDE: "1", "PYTHONPATH": f"{ROOT}/operator:{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4_000:]
    return False
