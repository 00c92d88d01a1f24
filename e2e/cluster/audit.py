"""The apiserver's audit log as a list of requests, so that a test can count what each user really wrote.

The log is written before the answer is sent, so a request that has been answered is in the file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

WRITE_VERBS = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_CHUNK = 1 << 16


@dataclass(frozen=True)
class AuditEvent:
    """One request that the apiserver answered. ``user`` of a service account is system:serviceaccount:NS:NAME."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    at: str
    uri: str

    @property
    def writes(self) -> bool:
        """Whether the request could change something."""
        return self.verb in WRITE_VERBS


def end_of_audit(path: Path) -> int:
    """Byte offset behind the last whole line: what the apiserver is writing now belongs to what comes later."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            log.seek(start)
            found = log.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def read_audit(path: Path, since: int = 0) -> list[AuditEvent]:
    """Requests completed after byte offset ``since`` of the log, which an earlier ``end_of_audit`` gave."""
    events = []
    with path.open("rb") as log:
        log.seek(since)
        for line in log:
            if not line.endswith(b"\n"):
                break  # half written: it belongs to the next reading
            entry = json.loads(line)
            # A watch has two entries, at its start and its end; the first one is enough.
            if entry["stage"] not in ("ResponseComplete", "Panic") and entry["verb"] != "watch":
                continue
            if entry["verb"] == "watch" and entry["stage"] == "ResponseComplete":
                continue
            reference = entry.get("objectRef", {})
            events.append(
                AuditEvent(
                    user=entry["user"].get("username", ""),
                    verb=entry["verb"],
                    group=reference.get("apiGroup", ""),
                    resource=reference.get("resource", ""),
                    subresource=reference.get("subresource", ""),
                    namespace=reference.get("namespace", ""),
                    name=reference.get("name", ""),
                    code=entry.get("responseStatus", {}).get("code", 0),
                    at=entry["stageTimestamp"],
                    uri=entry["requestURI"],
                )
            )
    return events
