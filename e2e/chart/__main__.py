"""``python -m e2e.chart --write|--check``: the chart's README and the kustomize base, made from the chart.

Invariant: the output depends on chart and CRDs only, so a difference always means that somebody forgot ``--write``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from e2e.chart import base, readme
from rlfleet.api import generated


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything is written or equal; 1: --check finds a difference, or the chart can not be read."""
    chosen = generated.arguments("python -m e2e.chart", "Files made from the chart.", arguments, root=base.root())
    try:
        made = {"charts/rlfleet/README.md": readme.page(), **base.files()}
    except readme.UndocumentedError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:
        print(f"error: helm template: {e.stderr}", file=sys.stderr)
        return 1
    return generated.write_or_check(made, chosen, "the chart")


if __name__ == "__main__":
    raise SystemExit(main())
