"""Files that are made from code, and the one way to write or check them.

Invariant: ``--check`` fails exactly when ``--write`` would change something, so a difference always means that somebody
forgot ``make generate``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def arguments(prog: str, description: str, argv: Sequence[str] | None, *, root: Path) -> argparse.Namespace:
    """``--write`` or ``--check`` (exactly one), and ``--root``: where the files lie, ``root`` by default."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write the files")
    what.add_argument("--check", action="store_true", help="fail if a file differs from what would be written")
    parser.add_argument("--root", type=Path, default=root, help="where the files lie (default: this checkout)")
    return parser.parse_args(argv)


def write_or_check(made: Mapping[str, str], chosen: argparse.Namespace, source: str) -> int:
    """``made``: path below the root -> text; ``source``: what they are made from, for the message.

    0: everything is written or equal; 1: ``--check`` found a difference, and named each file.
    """
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
        print(f"{'wrote' if chosen.write else f'differs from {source}'}: {path}")
    if stale and chosen.check:
        print("run `make generate` and commit the result", file=sys.stderr)
        return 1
    return 0
