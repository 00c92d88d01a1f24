"""What each pause mode does to a request that runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gate.kit import Engine, Operator, Weights, until


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    started = Engine(tmp_path, "--step-ms", "40")
    try:
        yield started.up()
    finally:
        started.close()


def pause_under_load(operator: Operator, engine: Engine, mode: str | None, tokens: int) -> dict[str, Any]:
    """Pause while a request runs, load other weights, resume; how the request ended."""
    operator.serve(Weights.of(1), 1)
    newer, weights = operator.next(), Weights.of(2)
    newer.prepare(weights, 2)
    newer.push_all(weights)
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    with ThreadPoolExecutor() as pool:
        asked: Future[Any] = pool.submit(lambda: engine.http.post("/generate", json=body, timeout=120).json())
        until("it runs", lambda: engine.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 1)
        # Only Wait spends the time on draining: the others need what is left of the budget for themselves.
        drain = {"drainSeconds": 60, "budgetSeconds": 90 if mode == "Wait" else 30}
        newer.ok("Pause", **drain, **({"mode": mode} if mode else {}))
        newer.ok("Load", **newer.load_order(weights, 2))
        newer.ok("Verify", **newer.names(weights, 2))
        newer.ok("Publish", **newer.names(weights, 2))
        newer.ok("Resume", **newer.names(weights, 2))
        answer: dict[str, Any] = asked.result()["meta_info"]
    return answer


@pytest.mark.parametrize(
    ("mode", "tokens", "end", "versions"),
    [
        (None, 60, "length", ["1", "2"]),  # retracted, and recomputed with the new weights
        ("Wait", 60, "length", ["1"]),
        ("Abort", 200, "abort", ["1"]),
    ],
)
def test_a_running_request(
    operator: Operator, engine: Engine, mode: str | None, tokens: int, end: str, versions: list[str]
) -> None:
    meta = pause_under_load(operator, engine, mode, tokens)
    assert meta["finish_reason"]["type"] == end
    assert [span["version"] for span in meta["weight_versions"]] == versions
