"""Log lines: keyed alike in both formats, and without secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest

from rlfleet.api.tokens import Scope
from rlfleet.logkeys import add, bound
from rlfleet.logs import JsonFormatter, TextFormatter, redacted

TOKEN = "eyJhbGciOiJFZERTQSJ9.eyJhdWQiOlsieCJdfQ.c2lnbmF0dXJlLW9mLWl0"
PEM = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "rlfleet.x"})
    vars(made).update(extra)
    return made


def test_lines_carry_the_keys_of_their_reconcile() -> None:
    with bound(pipeline="ns/p"), bound(roundUID="u1"):
        add(generation=3, fence=9)
        line = json.loads(JsonFormatter().format(record("Planned", generation=7, roundUID="u2")))
    assert (line["pipeline"], line["roundUID"], line["generation"], line["fence"]) == ("ns/p", "u2", 7, 9)
    assert not {"pipeline", "fence"} & set(json.loads(JsonFormatter().format(record("outside"))))


async def test_keys_follow_into_tasks_and_into_no_other_reconcile() -> None:
    async def logged() -> str:
        await asyncio.sleep(0)
        return JsonFormatter().format(record("x"))

    async def reconcile(name: str) -> str:
        with bound(pipeline=name):
            return await asyncio.create_task(logged())

    lines = await asyncio.gather(reconcile("ns/a"), reconcile("ns/b"), logged())
    assert [json.loads(x).get("pipeline") for x in lines] == ["ns/a", "ns/b", None]


def test_a_gate_s_lines_say_whose_they_are_and_leave_out_what_is_not_known() -> None:
    line = json.loads(JsonFormatter({"pod": "e-0"}).format(record("operation ended", kind="Load", error=None)))
    assert (line["pod"], line["kind"]) == ("e-0", "Load")
    assert "error" not in line


def test_text_has_the_same_keys_behind_the_message() -> None:
    with bound(pipeline="ns/p"):
        line = TextFormatter().format(record("Planned: 2 engines", generation=7, why="two words", status={"a": 1}))
    assert line.endswith('rlfleet.x: Planned: 2 engines pipeline=ns/p generation=7 why="two words" status={"a":1}')


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
@pytest.mark.parametrize("secret", [TOKEN, PEM, f"Authorization: Bearer {TOKEN}", "bearer 0123456789abcdef=="])
def test_secrets_leave_in_no_line(formatter: logging.Formatter, secret: str) -> None:
    try:
        raise RuntimeError(f"sent {secret}")
    except RuntimeError:
        text = formatter.format(record(f"headers: {secret}", header=secret, exc_info=sys.exc_info()))
    for part in ("eyJhdWQ", "MC4CAQAw", "0123456789abcdef"):
        assert part not in text
    assert "[redacted]" in text


def test_a_line_is_json_even_where_a_key_is_cut_off() -> None:
    line = json.loads(JsonFormatter().format(record(f"read {PEM[:40]}", found={"keys": [PEM[:40]]}, engine="e-0")))
    assert (line["message"], line["found"], line["engine"]) == ("read [redacted]", {"keys": ["[redacted]"]}, "e-0")


def test_what_is_no_secret_stays() -> None:
    text = "bearer of bad news: sha256:0123456789abcdef, version 3, eyJ.no.jwt, PRIVATE KEY"
    assert redacted(text) == text
    assert Scope.PUSH.value in redacted(f"scope {Scope.PUSH.value}")
