"""How commands speak: tables for people, JSON and YAML for programs; with and without colour, wide or narrow.

Invariants:
- documents (-o json, -o yaml) go to standard output alone; hints and progress go to standard error;
- nothing is cut off where the output is no terminal, so that it can be searched.
"""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import Any

from rich.console import Console, RenderableType

from rlfleet.show.facts import document

#: Width of what is written to a file or a pipe, unless COLUMNS says otherwise.
PIPE_WIDTH = 200


class Format(StrEnum):
    """Formats of -o."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def console(*, err: bool = False) -> Console:
    """Where to write. Colour only on a terminal, never with NO_COLOR."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)


def plain(what: RenderableType) -> str:
    """What would be printed into a file."""
    screen = Console(width=PIPE_WIDTH, highlight=False, emoji=False, markup=False, no_color=True, color_system=None)
    with screen.capture() as text:
        screen.print(what)
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines())


def show(what: RenderableType) -> None:
    """Print for people; without the blanks at line ends that a terminal does not show anyway."""
    screen = console()
    if screen.is_terminal:
        screen.print(what)
        return
    with screen.capture() as text:
        screen.print(what)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))


def dump(value: Any, form: Format) -> None:
    """Write a document as JSON or YAML."""
    plain = document(value)
    if form is Format.YAML:
        import yaml

        sys.stdout.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120))
    else:
        sys.stdout.write(json.dumps(plain, indent=2, ensure_ascii=False) + "\n")
