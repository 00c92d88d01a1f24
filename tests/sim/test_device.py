"""The reference engine's device memory: what it gives back is gone and free; what it does to those who misuse it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.sim.device import ledger
from tests.sim.conftest import Engine, engine_starter

GIB = 2**30
GPU = "GPU-1"
PROMPT = [1, 2, 3]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One GPU, given to every process that this test starts."""
    ledger.create(tmp_path / "devices", GPU, 80 * GIB)
    monkeypatch.setenv(ledger.ROOT_ENV, str(tmp_path / "devices"))
    monkeypatch.setenv(ledger.VISIBLE_ENV, GPU)
    return tmp_path / "devices" / GPU


@pytest.fixture
def start(device: Path, tmp_path: Path) -> Iterator[Any]:
    with engine_starter(tmp_path) as starter:
        yield starter


def used(device: Path) -> float:
    """GiB in use by living processes."""
    return sum(ledger.holders(device).values()) / GIB


def release(engine: Engine, *tags: str) -> None:
    assert engine.post("/release_memory_occupation", {"tags": list(tags) or None}).status_code == 200


def resume(engine: Engine, *tags: str) -> None:
    assert engine.post("/resume_memory_occupation", {"tags": list(tags) or None}).status_code == 200


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_memory_is_taken_given_back_and_taken_again(start: Any, device: Path, backend: str) -> None:
    engine = start(backend, "--enable-memory-saver", "--mem-fraction-static", "0.5")
    before, whole = engine.checksum(), used(device)
    assert whole == pytest.approx(40.8)  # with the process's own share
    answer = engine.generate(PROMPT, 8, temperature=0)["output_ids"]
    release(engine, "kv_cache")
    assert 0.8 < used(device) < whole / 2
    resume(engine, "kv_cache")
    assert used(device) == pytest.approx(whole)
    assert engine.generate(PROMPT, 8, temperature=0)["output_ids"] == answer  # the weights stayed
    release(engine)
    assert used(device) == pytest.approx(0.8)
    resume(engine)
    assert used(device) == pytest.approx(whole)
    assert engine.checksum() != before
    assert set(engine.post("/get_weights_by_name", {"name": "lm_head.weight"}).json()[0]) == {0.0}


def test_without_the_saver_a_release_says_yes_and_frees_nothing(start: Any, device: Path) -> None:
    engine = start()
    before, whole = engine.checksum(), used(device)
    assert engine.http.get("/server_info").json()["enable_memory_saver"] is False
    release(engine)
    assert used(device) == whole
    resume(engine)
    assert engine.checksum() == before


def test_scripted_lies_about_memory(start: Any, device: Path) -> None:
    engine = start("numpy", "--enable-memory-saver")
    whole = used(device)
    engine.post("/_sim/faults", {"release_memory_occupation": {"action": "keep"}})
    release(engine)
    assert used(device) == pytest.approx(whole)
    resume(engine)
    engine.post("/_sim/faults", {"release_memory_occupation": {"action": "late", "seconds": 0.5}})
    release(engine)
    assert used(device) == pytest.approx(whole)
    engine.wait_for(lambda: used(device) < 1)


@pytest.mark.parametrize(
    ("what", "path", "body"),
    [
        ("KeyError", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("not active", "/release_memory_occupation", {"tags": ["weights"]}),
        ("illegal memory access", "/weights_checker", {"action": "checksum"}),
        ("illegal memory access", "/get_weights_by_name", {"name": "lm_head.weight"}),
        ("illegal memory access", "/generate", {"input_ids": PROMPT}),
    ],
)
def test_misuse_ends_the_engine(start: Any, what: str, path: str, body: dict[str, Any]) -> None:
    engine = start("numpy", "--enable-memory-saver")
    release(engine, "weights")
    with pytest.raises(httpx.TransportError):
        engine.post(path, body)
    assert engine.process.wait(120) == 1
    assert what in engine.log()


def test_two_engines_do_not_fit_unless_one_sleeps(start: Any, device: Path) -> None:
    first = start("numpy", "--enable-memory-saver", "--mem-fraction-static", "0.6")
    with pytest.raises(AssertionError, match=r"torch\.OutOfMemoryError"):
        start("numpy", "--mem-fraction-static", "0.6")
    release(first)
    second = start("numpy", "--mem-fraction-static", "0.6")
    with pytest.raises(httpx.TransportError):
        first.post("/resume_memory_occupation", {})
    assert "out of memory" in first.log()
    second.close()
    # What a process held is free when it is dead, however it died.
    assert used(device) == 0


def test_a_device_never_holds_more_than_it_has(device: Path) -> None:
    account = ledger.Account(ledger.visible(os.environ), "me")
    account.add(79 * GIB)
    with pytest.raises(ledger.DeviceOutOfMemory, match=r"GPU-1, 1073741824 are free"):
        account.add(2 * GIB)
    account.add(GIB)
    account.add(-80 * GIB)
    pages = ledger.Allocation.make(account, 4096, GIB)
    array = pages.array(0, (4,))
    array[...] = 7
    pages.drop()
    assert array.tolist() == [0, 0, 0, 0]
