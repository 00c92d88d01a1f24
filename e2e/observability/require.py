"""What a test that needs Prometheus does where it is not to be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.observability.programs import Missing, ensure


def require_prometheus() -> dict[str, Path]:
    """Paths of prometheus and promtool. Without them the test fails in CI and is skipped elsewhere, with the remedy."""
    try:
        return ensure()
    except Missing as e:
        if os.environ.get("CI") == "true":
            pytest.fail(str(e))
        pytest.skip(str(e))
