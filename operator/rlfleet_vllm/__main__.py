"""``python -m rlfleet_vllm install DIRECTORY``: put this package where an engine's PYTHONPATH finds it.

Invariant: the directory then holds a distribution as pip would leave it (files that everybody may read, and the entry
point by which vLLM finds the plug-in), and doing it again changes nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

NAME = "rlfleet_vllm"
ENTRY_POINTS = f"[vllm.general_plugins]\nrlfleet = {NAME}:register\n"


def install(directory: Path) -> Path:
    """Copy the package and write its metadata; the folder of the metadata. OSError where that is not possible."""
    package = directory / NAME
    package.mkdir(parents=True, exist_ok=True)
    package.chmod(0o755)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        target = package / source.name
        shutil.copyfile(source, target)
        target.chmod(0o644)
    about = directory / f"{NAME}-{version()}.dist-info"
    about.mkdir(exist_ok=True)
    about.chmod(0o755)
    described = f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: {version()}\n"
    for name, text in (("METADATA", described), ("entry_points.txt", ENTRY_POINTS), ("INSTALLER", "rlfleet\n")):
        (about / name).write_text(text, encoding="utf-8")
        (about / name).chmod(0o644)
    return about


def version() -> str:
    """Version of the distribution that this package came with."""
    return metadata.version("rlfleet")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description="Bring rlfleet into a vLLM engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("install", help="put the package where PYTHONPATH will point")
    into.add_argument("directory", type=Path, help="made if it is not there")
    directory: Path = parser.parse_args(argv).directory
    try:
        about = install(directory)
    except OSError as e:
        print(f"{NAME}: can not install into {directory}: {e}", file=sys.stderr)
        return 1
    print(f"installed {about.name.removesuffix('.dist-info')} in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
