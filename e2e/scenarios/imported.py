"""What a nursery of operators has ready before the first one is born: code, and what only depends on code."""

from __future__ import annotations

import rlfleet.app.operator  # noqa: F401
from rlfleet.api import served

served.needed()
