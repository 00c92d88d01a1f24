"""Follows a file that a container appends JSON lines to, and reads the end of logs.

Invariant: a line is handed out once and whole; what the writer has not ended with a newline yet stays in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Follower:
    """Reads what has been appended to a file since the last call. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def events(self) -> list[Event]:
        """The JSON objects that are new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        return [json.loads(line) for line in data[:end].splitlines()]


def tail(path: Path, lines: int = 15) -> list[str]:
    """The last lines of a log, for error messages."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return ["(no output)"]
