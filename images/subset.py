"""Prints the part of requirements.lock that one image needs: pins and hashes of some packages and of all they rest on.

There is one lock file, for everything that the repository's tests and tools use. ``uv`` notes in it which package
asked for which ("via"), and an image takes what its own roots lead to.
Invariant: a root that the lock does not hold is an error, never a package of any version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path


def blocks(text: str) -> list[tuple[str, str, set[str]]]:
    """The lock's entries: name, text, names of those that asked for it."""
    found = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        if not re.match(r"[A-Za-z0-9]", block):
            continue
        askers = set(re.findall(r"^    #(?: via|  )\s+([A-Za-z0-9._-]+)", block, re.MULTILINE))
        found.append((normal(re.split(r"[=\s\[;]", block, maxsplit=1)[0]), block, {normal(a) for a in askers}))
    return found


def normal(name: str) -> str:
    """One spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def roots(project: dict[str, object], extras: list[str]) -> set[str]:
    """Names in the project's dependencies and in those extras."""
    table = project["project"]
    assert isinstance(table, dict)
    wanted = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    return {normal(re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0]) for line in wanted}


def select(lock: str, wanted: set[str]) -> list[str]:
    """The entries of ``wanted`` and of everything below them. KeyError names what the lock lacks."""
    entries = blocks(lock)
    if missing := wanted - {name for name, _, _ in entries}:
        raise KeyError(f"not in the lock: {', '.join(sorted(missing))}")
    chosen = set(wanted)
    while added := {name for name, _, askers in entries if name not in chosen and askers & chosen}:
        chosen |= added
    return [text.rstrip() for name, text, _ in entries if name in chosen]


def main() -> int:
    """Reads pyproject.toml and requirements.lock of the current folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--no-project", action="store_true", help="only the named packages")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    wanted = {normal(name) for name in options.names}
    if not options.no_project:
        wanted |= roots(tomllib.loads(Path("pyproject.toml").read_text()), options.extra)
    print("\n".join(select(Path("requirements.lock").read_text(), wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
