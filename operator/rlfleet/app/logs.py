"""Logging of the operator process: one JSON object per line, or text for people."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", ...}`` with whatever ``extra`` a call carries."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        data = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        data |= {k: v for k, v in vars(record).items() if k not in _STANDARD and not k.startswith("_")}
        if record.exc_info:
            data["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(data, default=str)


def configure(log_format: str, level: str) -> None:
    """Send all logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # kopf reports every delivered event at INFO.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
