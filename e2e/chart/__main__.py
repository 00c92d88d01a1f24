"""``python -m e2e.chart --write|--check``: the chart's README and the kustomize base, made from the chart.

Invariant: the output depends on chart and CRDs only, so a difference always means that somebody forgot ``--write``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.chart import base, readme


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything is written or equal; 1: --check finds a difference, or the chart can not be read."""
    parser = argparse.ArgumentParser(prog="python -m e2e.chart", description="Files made from the chart.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the files")
    what.add_argument("--check", action="store_true", help="fail if a file differs from what would be written")
    parser.add_argument("--root", type=Path, default=base.root(), help="where the files lie (default: this checkout)")
    chosen = parser.parse_args(arguments)
    try:
        made = {"charts/rlfleet/README.md": readme.page(), **base.files()}
    except readme.UndocumentedError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:
        print(f"error: helm template: {e.stderr}", file=sys.stderr)
        return 1
    stale = []
    for path, text in made.items():
        target: Path = chosen.root / path
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if chosen.write:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'wrote' if chosen.write else 'differs from the chart'}: {path}")
    if stale and chosen.check:
        print("run `make generate` and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
