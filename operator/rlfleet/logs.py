"""Logging of operator and gate: one JSON object per line, or text for people; both keyed alike.

Invariant: every line of a reconcile carries its keys (rlfleet.logkeys: pipeline or pool, round, roundUID, generation),
and nothing that looks like a token or a private key leaves the process, whatever a message or an exception contains.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from rlfleet import logkeys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: JSON web tokens, other bearer tokens, and private keys in PEM.
_SECRET = re.compile(
    r"eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{5,}"
    r"|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
_HIDDEN = "[redacted]"
#: Names of levels, the most talkative first.
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


def redacted(text: str) -> str:
    """The text without what looks like a secret."""
    return _SECRET.sub(_HIDDEN, text)


def keys_of(record: logging.LogRecord) -> dict[str, Any]:
    """The keys of the running reconcile and what ``extra`` adds, which wins."""
    own = {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_") and v is not None}
    return {**logkeys.current(), **own}


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", ...}`` with the keys of the line; ``fields`` are in every one."""

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        data = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **keys_of(record),
        }
        if record.exc_info:
            data["exception"] = "".join(traceback.format_exception(*record.exc_info))
        # Value by value, so that the line stays JSON even where a key is cut off in the middle.
        return json.dumps(_clean(data), default=lambda v: redacted(str(v)))


def _clean(value: Any) -> Any:
    match value:
        case str():
            return redacted(value)
        case Mapping():
            return {redacted(str(k)): _clean(v) for k, v in value.items()}
        case list() | tuple():
            return [_clean(v) for v in value]
    return value


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then ``key=value``; objects as JSON."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        return super().formatMessage(record) + "".join(f" {k}={_plain(v)}" for k, v in keys_of(record).items())

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback below it."""
        return redacted(super().format(record))


def _plain(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[^\s\"={}]+", value):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def configure(log_format: str, level: str, fields: Mapping[str, Any] | None = None) -> None:
    """Send all logs to stderr. ``fields``: what every JSON line has besides its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # kopf reports every delivered event at INFO.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
