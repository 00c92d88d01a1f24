"""``python -m e2e.compatibility --write|--check``: the page of what was run for real, and at which version.

Invariant: the output depends on committed files only, so a difference always means that somebody forgot ``--write``.
"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.compatibility.page import Difference, NotRecordedError, Program, Sources, page, pinned
from e2e.dynamo.install import CURRENT, UNVERSIONED
from rlfleet.api import generated
from rlfleet.engine.known import KNOWN, Evidence

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/reference/compatibility.md"


def sources(root: Path = ROOT) -> Sources:
    """What is recorded in this checkout."""
    found: Any = importlib.import_module("tests.contract.differences")
    return Sources(
        json.loads((root / "tests/contract/results.json").read_text()),
        KNOWN,
        [Difference(d.kind, d.case, d.reason) for d in found.DIFFERENCES],
        programs(root),
    )


def programs(root: Path) -> list[Program]:
    """Everything beside engines, at the versions that are pinned."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    routers = [
        Program(
            f"router `{kind}`",
            (pinned(dev, package),),
            "tested: the real one, with requests through it",
            "`tests/router`, `e2e/scenarios/test_routers.py`",
        )
        for kind, package in (("SGLangRouter", "sglang-router"), ("SMG", "smg"), ("VLLMRouter", "vllm-router"))
    ]
    real = tuple(f"{k.engine} {k.version}" for k in KNOWN if k.evidence is Evidence.TESTED)
    return [
        Program(
            "rounds on real engines",
            real,
            "tested: through operator and gates on hollow nodes, with a real router in front",
            "`e2e/scenarios/test_real_*.py`",
        ),
        *routers,
        Program("router `Readiness`", (), "tested: a real kubelet", "`e2e/node`"),
        Program("router `InferencePool`", (), "tested: a real apiserver; no gateway", "`e2e/scenarios`"),
        Program(
            "engines of type `Dynamo`",
            (CURRENT, UNVERSIONED),
            "discovery real (frontend, file discovery, request plane, system server), the engine scripted. Whether a "
            "worker is paused is read from the words of a refusal, because no field tells it: another release that "
            "words it otherwise keeps its engines closed",
            "`tests/discovery/test_real_dynamo.py`",
        ),
        Program(
            "clients of [worker discovery](discovery.md)",
            (),
            "read: the checks of prime-rl's and ModelExpress's clients, replayed; our own client of Dynamo for real. "
            "NeMo-RL reads its own frontend's `/health` instead",
            "`tests/discovery`",
        ),
        Program("training frameworks", (), "see [frameworks](../guides/frameworks.md)", "`docs/examples`"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the page is written or equal; 1: --check finds a difference, or records are missing."""
    chosen = generated.arguments("python -m e2e.compatibility", "The page of compatibility.", arguments, root=ROOT)
    try:
        made = {PAGE: page(sources())}
    except NotRecordedError as e:
        print(e, file=sys.stderr)
        return 1
    return generated.write_or_check(made, chosen, "what is recorded")


if __name__ == "__main__":
    raise SystemExit(main())
