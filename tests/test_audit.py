"""The apiserver's audit log, read while the apiserver writes it."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster.audit import end_of_audit, read_audit


def line(name: str, padding: int = 0) -> bytes:
    entry = {
        "stage": "ResponseComplete", "verb": "get", "user": {"username": "u"}, "objectRef": {"name": name},
        "stageTimestamp": "2026-01-01T00:00:00Z", "requestURI": "/" + "x" * padding,
    }  # fmt: skip
    return json.dumps(entry).encode() + b"\n"


def test_a_mark_is_never_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    log.touch()
    assert end_of_audit(log) == 0
    # One line is longer than what is looked at in one go.
    for padding in (0, 100, 200_000):
        whole = line("before") * 3
        log.write_bytes(whole)
        assert end_of_audit(log) == len(whole)
        late = line("late", padding)
        for cut in (1, len(late) // 2, len(late) - 1):
            log.write_bytes(whole + late[:cut])
            mark = end_of_audit(log)
            assert [e.name for e in read_audit(log)] == ["before"] * 3
            assert read_audit(log, mark) == []
            log.write_bytes(whole + late + line("after"))
            assert [e.name for e in read_audit(log, mark)] == ["late", "after"]
