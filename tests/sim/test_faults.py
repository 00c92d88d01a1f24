"""Scripted faults strike the call they name, as often as they say, and the load client books every one of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.sim.model import MODELS, initial_state
from e2e.sim.tensors import write_safetensors

ROOT = Path(__file__).resolve().parents[2]


def set_faults(engine: Any, rules: dict[str, Any]) -> None:
    assert engine.post("/_sim/faults", rules).status_code == 200


def test_http500_before_and_after_the_work(start_engine: Any) -> None:
    engine = start_engine("numpy")
    set_faults(engine, {"update_weight_version": {"action": "http500", "times": 1}})
    assert engine.post("/update_weight_version", {"new_version": "1"}).status_code == 500
    assert engine.http.get("/model_info").json()["weight_version"] == "default"
    assert engine.post("/update_weight_version", {"new_version": "1"}).status_code == 200
    set_faults(engine, {"update_weight_version": {"action": "http500", "when": "after", "times": 1}})
    assert engine.post("/update_weight_version", {"new_version": "2"}).status_code == 500
    assert engine.http.get("/model_info").json()["weight_version"] == "2"  # a failure that was none


def test_delay_and_hang(start_engine: Any) -> None:
    engine = start_engine("numpy")
    set_faults(
        engine,
        {
            "begin_weight_update": {"action": "delay", "seconds": 0.5, "times": 1},
            "end_weight_update": {"action": "hang"},
        },
    )
    with pytest.raises(httpx.ReadTimeout):
        engine.post("/begin_weight_update", timeout=0.1)
    assert engine.post("/begin_weight_update").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        engine.post("/end_weight_update", timeout=0.5)
    set_faults(engine, {})
    assert engine.post("/end_weight_update").status_code == 200


def test_a_held_call_acts_when_the_rules_are_replaced(start_engine: Any) -> None:
    engine = start_engine("numpy")
    set_faults(engine, {"update_weight_version": {"action": "hold", "times": 1}})
    with ThreadPoolExecutor() as pool:
        held = pool.submit(engine.post, "/update_weight_version", {"new_version": "1"}, timeout=60)
        while not engine.http.get("/_sim/faults").json()["update_weight_version"]["struck"]:
            assert not held.done()
        assert engine.http.get("/model_info").json()["weight_version"] == "default"
        set_faults(engine, {})
        assert held.result(60).status_code == 200
    assert engine.http.get("/model_info").json()["weight_version"] == "1"


def test_the_fault_file_is_read_at_every_call(start_engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    engine = start_engine("numpy", "--fault-file", str(file))
    assert engine.post("/continue_generation").status_code == 200
    file.write_text(json.dumps({"continue_generation": {"action": "http500", "times": 1}}))
    assert engine.post("/continue_generation").status_code == 500
    assert engine.post("/continue_generation").status_code == 200
    file.write_text(json.dumps({"continue_generation": {"action": "die"}}))
    with pytest.raises(httpx.TransportError):
        engine.post("/continue_generation")
    assert engine.process.wait(120) == -signal.SIGKILL


def test_a_lie_answers_success_and_does_nothing(start_engine: Any) -> None:
    engine = start_engine("numpy")
    set_faults(engine, {"update_weight_version": {"action": "lie"}, "pause_generation": {"action": "lie"}})
    assert engine.post("/update_weight_version", {"new_version": "1"}).json()["success"] is True
    assert engine.http.get("/model_info").json()["weight_version"] == "default"
    assert engine.post("/pause_generation").json()["status"] == "ok"
    assert engine.http.get("/ready").status_code == 200


def test_half_of_the_tensors_is_loaded_with_and_without_a_word(start_engine: Any, tmp_path: Path) -> None:
    engine = start_engine("numpy", "--seed", "1")
    write_safetensors(tmp_path / "model.safetensors", initial_state(MODELS["tiny"], 7))
    order = {"model_path": str(tmp_path), "flush_cache": False}

    def checksum() -> str:
        return str(engine.post("/weights_checker", {"action": "checksum"}).json()["per_engine_checksum"])

    before = checksum()
    set_faults(engine, {"update_weights_from_disk": {"action": "subset", "times": 1}})
    assert engine.post("/update_weights_from_disk", order).json()["success"] is True
    half = checksum()
    assert engine.post("/update_weights_from_disk", order).status_code == 200
    whole = checksum()
    assert len({before, half, whole}) == 3
    write_safetensors(tmp_path / "model.safetensors", initial_state(MODELS["tiny"], 8))
    set_faults(engine, {"update_weights_from_disk": {"action": "partial", "times": 1}})
    refused = engine.post("/update_weights_from_disk", order)
    assert (refused.status_code, "partially updated" in refused.text) == (400, True)
    assert checksum() != whole


def test_a_zombie_closes_its_port_answers_nobody_and_stays(start_engine: Any) -> None:
    engine = start_engine("numpy")
    assert engine.http.get("/model_info").status_code == 200  # a connection that stays open
    set_faults(engine, {"update_weights_from_disk": {"action": "zombie"}})
    with pytest.raises(httpx.ReadTimeout):
        engine.post("/update_weights_from_disk", {"model_path": "x"}, timeout=0.3)
    with httpx.Client(base_url=engine.url) as newcomer, pytest.raises(httpx.ConnectError):
        newcomer.get("/model_info")
    assert engine.process.poll() is None


@pytest.mark.parametrize(
    "rules", [[], {"x": {"action": "explode"}}, {"x": {"action": "die", "when": "never"}}, {"x": 3}]
)
def test_malformed_rules_are_refused(start_engine: Any, rules: Any) -> None:
    assert start_engine("numpy").post("/_sim/faults", rules).status_code == 400


# ---- the load client ---------------------------------------------------------------------------------------------


def run_load(url: str, summary: Path, *more: str) -> tuple[int, dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "e2e.sim.load",
        "--router",
        url,
        "--summary",
        str(summary),
        "--wait-serving",
        "30",
        *more,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert summary.exists(), done.stderr
    books: dict[str, Any] = json.loads(summary.read_text())
    assert json.loads(done.stdout) == books
    return done.returncode, books


def test_load_client_counts_whole_answers_and_their_versions(start_engine: Any, tmp_path: Path) -> None:
    engine = start_engine("numpy")
    engine.post("/update_weight_version", {"new_version": "7"})
    code, books = run_load(engine.url, tmp_path / "books.json", "--seconds", "1")
    assert code == 0
    assert books["ended"]
    assert books["sent"] == books["answered"] > 0
    assert books["failed"] == books["inFlight"] == 0
    assert books["versions"] == {"7": books["answered"]}


def test_load_client_never_retries_and_names_each_kind_of_failure(start_engine: Any, tmp_path: Path) -> None:
    engine = start_engine("numpy", "--step-ms", "5")
    file = tmp_path / "books.json"
    command = [sys.executable, "-m", "e2e.sim.load", "--router", engine.url, "--summary", str(file)]
    client = subprocess.Popen([*command, "--min-tokens", "60", "--max-tokens", "60"], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        engine.wait_for(lambda: engine.load()["num_running_reqs"] > 0)
        engine.post("/abort_request", {"abort_all": True})
        set_faults(engine, {"generate": {"action": "http500", "times": 3}})
        engine.wait_for(lambda: file.exists() and json.loads(file.read_text())["failures"].get("http500") == 3)
        engine.process.kill()
        engine.process.wait()
        engine.wait_for(lambda: "connect" in json.loads(file.read_text())["failures"])
    finally:
        client.send_signal(signal.SIGTERM)
        out, _ = client.communicate(timeout=60)
    books = json.loads(out)
    assert client.returncode == 1
    assert books["failures"]["http500"] == 3
    assert books["failures"]["abort"] >= 1
    assert books["sent"] == books["answered"] + books["failed"]
    assert set(books["examples"]) == set(books["failures"])
