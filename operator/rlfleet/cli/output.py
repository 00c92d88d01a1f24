"""How commands speak: tables for people, JSON and YAML for programs; with and without colour, wide or narrow.

Invariants:
- documents (-o json, -o yaml) go to standard output alone; hints and progress go to standard error;
- nothing is cut off where the output is no terminal, so that it can be searched;
- text from objects never steers a terminal: whoever may write a status is not whoever reads it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from rlfleet.show.facts import document

#: Width of what is written to a file or a pipe, unless COLUMNS says otherwise.
PIPE_WIDTH = 200


#: What a terminal takes for commands: everything of C0 and C1 but tab and the end of a line.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def tame(text: str) -> str:
    """The text without what a terminal would obey."""
    return text.translate(_CONTROLS)


@dataclass(frozen=True, slots=True)
class Tamed:
    """Something to print, whose text is text only; colours and lines are ours."""

    what: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        for text, style, control in console.render(self.what, options):
            yield Segment(text if control else tame(text), style, control)


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
        screen.print(Tamed(what))
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines())


def show(what: RenderableType) -> None:
    """Print for people; without the blanks at line ends that a terminal does not show anyway."""
    screen, what = console(), Tamed(what)
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
        text = json.dumps(plain, indent=2, ensure_ascii=False)
        # JSON escapes C0 by itself.
        sys.stdout.write(text.translate({code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}) + "\n")
