"""What tests with the real Dynamo runtime have in common."""

from __future__ import annotations

import os

import pytest

from e2e.dynamo.install import CURRENT, InstallError, ensure


def installed(*versions: str) -> None:
    """Install these versions, or the present one. Where that fails the test fails in CI, and is skipped elsewhere."""
    for version in versions or (CURRENT,):
        try:
            ensure(version)
        except InstallError as e:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"Dynamo {version} is not here and cannot be installed: {e}")
