"""``python -m rlfleet.gate``."""

from __future__ import annotations

import sys

from rlfleet.gate.main import main

if __name__ == "__main__":
    sys.exit(main())
