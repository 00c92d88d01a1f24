"""Removes a cluster whose owner was killed.

A test run or a demo owns its cluster and takes it down itself. When that process dies without a chance to (SIGKILL, a
CI job's hard stop), the guard does it: a small process that holds one end of a pipe. The kernel closes the other end at
the owner's death, whatever its cause.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_END_SECONDS = 60.0


class Guard:
    """Watches over the cluster in ``state`` until ``release``. ``module``: whose ``guard`` command takes it down."""

    def __init__(self, state: Path, module: str = "e2e.cluster") -> None:
        reading, self._writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "guard", "--state", str(state)],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "operator"), str(_ROOT)])},
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def release(self) -> None:
        """Ends the guard. To be called when the cluster is down; otherwise the guard takes it down."""
        os.close(self._writing)
        self._process.wait(_END_SECONDS)
