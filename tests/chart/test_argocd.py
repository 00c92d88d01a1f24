"""Argo CD's health script for our kinds, run by a real Lua."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import LuaRuntime

from rlfleet.api.conditions import PipelineCondition, PoolCondition, RoundCondition
from rlfleet.plan.rounds import TERMINAL

FILE = Path(__file__).resolve().parents[2] / "docs/examples/argocd-health.yaml"
PREFIX = "resource.customizations.health.rlfleet.dev_"


def scripts() -> dict[str, str]:
    """Kind -> script."""
    data = yaml.safe_load(FILE.read_text())["data"]
    return {key.removeprefix(PREFIX): text for key, text in data.items()}


def health(obj: dict[str, Any], kind: str = "RLPipeline") -> tuple[str, str]:
    """Status and message that Argo CD would show."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    # As Argo CD does: the object is the global `obj`, the script's result the verdict.
    lua.globals().obj = table(lua, obj)
    found = lua.execute(scripts()[kind])
    return str(found.status), str(found.message)


def table(lua: LuaRuntime, value: Any) -> Any:
    if isinstance(value, dict):
        return lua.table_from({k: table(lua, v) for k, v in value.items()})
    if isinstance(value, list):
        return lua.table_from([table(lua, v) for v in value])
    return value


def obj(*conditions: tuple[str, str], generation: int = 3, observed: int = 3, **status: Any) -> dict[str, Any]:
    found = [{"type": t, "status": s, "reason": f"{t}Reason", "message": "words"} for t, s in conditions]
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": observed, "conditions": found, **status},
    }


def test_every_kind_with_conditions_has_the_script() -> None:
    assert scripts().keys() == {"RLPipeline", "EnginePool", "SyncRound"}
    assert len(set(scripts().values())) == 1


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        ({"metadata": {}}, "Progressing"),
        ({"metadata": {}, "status": {}}, "Progressing"),
        (obj(("Ready", "False"), ("Progressing", "True"), ("Degraded", "False")), "Progressing"),
        (obj(("Ready", "Unknown")), "Progressing"),
        (obj(("Ready", "True"), ("Degraded", "False")), "Healthy"),
        (obj(("Ready", "True"), ("Degraded", "True")), "Degraded"),
        (obj(("Ready", "True"), generation=4), "Progressing"),
        (obj(("Complete", "False"), ("Failed", "False"), ("Progressing", "True"), phase="Staging"), "Progressing"),
        (obj(("Complete", "True"), ("Failed", "False"), phase="Succeeded"), "Healthy"),
        (obj(("Complete", "False"), ("Failed", "True"), phase="Failed"), "Degraded"),
        (obj(("Complete", "False"), ("Failed", "False"), phase="Superseded"), "Healthy"),
        (obj(("Complete", "False"), ("Failed", "False"), phase="Cancelled"), "Healthy"),
    ],
    ids=str,
)
def test_health_follows_conditions(thing: dict[str, Any], expected: str) -> None:
    status, message = health(thing)
    assert status == expected
    assert message


def test_the_message_is_the_condition_s() -> None:
    assert health(obj(("Ready", "False")))[1] == "ReadyReason: words"
    assert health(obj(("Ready", "True"), ("Degraded", "True")))[1] == "DegradedReason: words"


def test_the_script_knows_our_words() -> None:
    words = {c.value for kind in (PipelineCondition, PoolCondition, RoundCondition) for c in kind} | set(TERMINAL)
    for word in ("Ready", "Degraded", "Progressing", "Complete", "Failed", "Superseded", "Cancelled"):
        assert word in words
        assert f'"{word}"' in scripts()["SyncRound"] or f".{word}" in scripts()["SyncRound"]
