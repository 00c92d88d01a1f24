"""Checkpoints: only a complete one whose every byte was hashed reaches an engine, and nothing is touched before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api.checkpoint import MANIFEST_FILE, MARKER_FILE, Descriptor, file_name
from rlfleet.api.manifest import Manifest, TensorEntry, manifest_digest, safetensors_header
from rlfleet.sender import CheckpointExists, checkpoint
from tests.gate.kit import Engine, Gate, Operator, Weights, until

DISK = "/update_weights_from_disk"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The shared volume."""
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture
def gate(engine: Engine, make_gate: Callable[..., Gate], root: Path) -> Gate:
    """A gate that mounts it."""
    return make_gate(engine.url, RLFLEET_CHECKPOINT_DIR=str(root))


def write(root: Path, version: int, seed: int | None = None) -> Manifest:
    """A checkpoint of the reference model in several files."""
    state = torch_state(MODELS["tiny"], version if seed is None else seed)
    return checkpoint.write(f"{root}/run/{{version}}", version, state, bucket_bytes=40_000)


def prepare(manifest: Manifest, version: int, **change: Any) -> dict[str, Any]:
    """A Prepare order for it."""
    order = {
        "transport": "Checkpoint",
        "version": version,
        "manifestDigest": manifest.digest,
        "totalBytes": 0,
        "directory": f"run/{version}",
    }
    return order | change


def load(manifest: Manifest, version: int) -> dict[str, Any]:
    """A Load order for it."""
    return {"transport": "Checkpoint", "version": version, "manifestDigest": manifest.digest}


def serve(operator: Operator, manifest: Manifest, version: int) -> None:
    """All of a round's orders to one gate."""
    named = {"version": version, "manifestDigest": manifest.digest}
    operator.ok("Prepare", **prepare(manifest, version))
    operator.ok("Pause")
    operator.ok("Load", **load(manifest, version))
    operator.ok("Verify", **named)
    operator.ok("Publish", **named)
    operator.ok("Resume", **named)


def test_an_engine_takes_over_checkpoints_and_keeps_its_name(
    engine: Engine, gate: Gate, operator: Operator, root: Path
) -> None:
    first, second = write(root, 1, seed=101), write(root, 2, seed=102)
    assert len(first.bucket_bytes) > 1
    serve(operator, first, 1)
    staged = operator.status()["staged"]
    assert (staged["complete"], staged["receivedBytes"]) == (True, first.total_bytes)
    assert staged["totalBytes"] == first.total_bytes
    one, name = engine.checksum(), engine.http.get("/model_info").json()["model_path"]
    later = operator.next()
    serve(later, second, 2)
    assert engine.checksum() != one
    assert engine.label() == "2"
    assert engine.http.get("/model_info").json()["model_path"] == name
    # The same bytes, pushed: the engine can not tell the difference.
    pushed = later.next("round-3")
    weights = Weights.of(101)
    pushed.deliver(weights, 3)
    assert engine.checksum() == one
    assert not (gate.staging / "current").is_symlink()
    assert sorted(p.name for p in (root / "run" / "1").iterdir())[-1].startswith("model-")


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _flip_last_bit(folder: Path) -> None:
    file = _first(folder)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _lie_in_the_header(folder: Path) -> None:
    file = _first(folder)
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32"', b'"I32"', 1))


def _cut(folder: Path) -> None:
    file = _first(folder)
    file.write_bytes(file.read_bytes()[:-4])


def _add_weights(folder: Path) -> None:
    (folder / "zz.safetensors").write_bytes(_first(folder).read_bytes())


def _other_version(folder: Path) -> None:
    described = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(described | {"version": 99}))


def _other_marker(folder: Path) -> None:
    (folder / MARKER_FILE).write_text("sha256:" + "0" * 64)


def _no_json(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{")


REFUSED: dict[str, tuple[Callable[[Path], None], dict[str, Any], str, str]] = {
    "no marker": (_without(MARKER_FILE), {}, "CheckpointMissing", MARKER_FILE),
    "no manifest": (_without(MANIFEST_FILE), {}, "CheckpointMissing", MANIFEST_FILE),
    "a flipped bit": (_flip_last_bit, {}, "HashMismatch", "the manifest says"),
    "a header that lies": (_lie_in_the_header, {}, "CheckpointInvalid", "is not what the manifest says"),
    "a file cut short": (_cut, {}, "CheckpointInvalid", "bytes, its manifest says"),
    "a missing file": (lambda f: _first(f).unlink(), {}, "CheckpointInvalid", "can not be read"),
    "more weights": (_add_weights, {}, "CheckpointInvalid", "zz.safetensors is not in its manifest.json"),
    "another version": (_other_version, {}, "HashMismatch", "holds version 99"),
    "another marker": (_other_marker, {}, "HashMismatch", "marker: sha256:0000"),
    "no JSON": (_no_json, {}, "CheckpointInvalid", "can not be read"),
    "another path": (lambda _: None, {"directory": "run/77"}, "CheckpointMissing", "is no directory here"),
    "a path outside": (lambda _: None, {"directory": "run/../../x"}, "Invalid", "leaves the checkpoint volume"),
    "no time": (lambda _: None, {"budgetSeconds": 1e-6}, "DeadlineExceeded", "raise stagingSeconds"),
}


def test_what_is_not_complete_and_right_is_refused_and_touches_nothing(
    engine: Engine, operator: Operator, root: Path
) -> None:
    good = write(root, 1, seed=201)
    serve(operator, good, 1)
    before = engine.checksum()
    for number, (name, (spoil, change, reason, says)) in enumerate(REFUSED.items(), start=2):
        operator = operator.next(f"round-{number}")
        manifest = write(root, number, seed=300 + number)
        spoil(root / "run" / str(number))
        record = operator.run("Prepare", **prepare(manifest, number, **change))
        assert record["state"] == "Failed", name
        assert (record["error"]["reason"], says in record["error"]["message"]) == (reason, True), (name, record)
        status = operator.status()
        assert not status["staged"]["complete"]
        assert status["staged"]["error"]["reason"] == reason
        assert operator.refused("Load", **load(manifest, number)) == "NotStaged"
        assert len(status["loads"]) == 1
    assert engine.checksum() == before
    assert (engine.ready(), engine.label()) == (200, "1")


def test_a_gate_without_the_volume_says_what_to_set(engine: Engine, make_gate: Callable[..., Gate], root: Path) -> None:
    operator = Operator(make_gate(engine.url)).ready()
    record = operator.run("Prepare", **prepare(write(root, 1), 1))
    assert record["error"]["reason"] == "CheckpointMissing"
    assert "spec.gate.checkpointVolume" in record["error"]["message"]


def test_files_that_change_after_they_were_hashed_are_not_loaded(
    engine: Engine, operator: Operator, gate: Gate, root: Path
) -> None:
    manifest = write(root, 1, seed=401)
    operator.ok("Prepare", **prepare(manifest, 1))
    operator.ok("Pause")
    before = engine.checksum()
    file = _first(root / "run" / "1")
    right = file.read_bytes()
    _flip_last_bit(file.parent)
    assert operator.refused("Load", **load(manifest, 1)) == "HashMismatch"
    assert operator.status()["loads"] == []
    assert operator.run("Prepare", attempt=2, **prepare(manifest, 1))["error"]["reason"] == "HashMismatch"
    assert engine.checksum() == before
    file.write_bytes(right)
    operator.ok("Prepare", attempt=3, **prepare(manifest, 1))

    # A restarted gate reads again before it lets an engine load.
    gate.kill()
    gate.start()
    until("the gate again", lambda: operator.status()["engine"].get("paused") is True)
    assert operator.refused("Load", **load(manifest, 1)) == "NotStaged"
    operator.ok("Prepare", attempt=4, **prepare(manifest, 1))

    # Written to while the engine reads: what it holds nobody knows.
    engine.faults(**{DISK: {"action": "delay", "seconds": 1.5, "times": 1, "when": "after"}})
    started = operator.start("Load", **load(manifest, 1))
    assert started.status_code == 202
    until("the load to begin", lambda: operator.status()["loads"])
    os.utime(file, ns=(1, 1))
    record = operator.wait(started.json()["id"])
    assert (record["state"], record["error"]["reason"]) == ("Failed", "HashMismatch")
    assert operator.status()["loads"][0]["state"] == "Failed"
    assert operator.refused("Verify", version=1, manifestDigest=manifest.digest) == "NotProven"


def test_hashing_ends_when_other_work_fences_the_gate(operator: Operator, root: Path) -> None:
    # Gigabytes of nothing: it would be long until somebody finds that their hash is wrong.
    entry = TensorEntry(name="w", dtype="uint8", shape=(64 << 30,), hash="0" * 32, bucket=0, offset=0)
    digest = manifest_digest("xxh3-128", [entry])
    manifest = Manifest(tensors=(entry,), bucket_bytes=(entry.nbytes,), digest=digest)
    folder = root / "run" / "1"
    folder.mkdir(parents=True)
    described = Descriptor(version=1, files=(file_name(0, 1),), manifest=manifest)
    (folder / MANIFEST_FILE).write_text(described.model_dump_json(by_alias=True))
    (folder / MARKER_FILE).write_text(digest)
    header = safetensors_header(manifest.tensors)
    with (folder / file_name(0, 1)).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + entry.nbytes)
    started = operator.start("Prepare", **prepare(manifest, 1))
    assert started.status_code == 202
    other = operator.next("other")
    assert other.start("Discard").json()["reason"] == "Busy"
    record = other.wait(started.json()["id"])
    assert (record["state"], record["error"]["reason"]) == ("Failed", "OtherOperation"), record
    good = write(root, 2, seed=7)
    other.ok("Prepare", **prepare(good, 2))


def test_nothing_is_pushed_into_a_checkpoint(operator: Operator, root: Path) -> None:
    manifest = write(root, 1)
    operator.ok("Prepare", **prepare(manifest, 1))
    answer = operator.push("manifest", manifest.model_dump_json(by_alias=True))
    assert (answer.status_code, answer.json()["reason"]) == (409, "NotStaged")
    assert operator.push("buckets/0", b"x" * manifest.bucket_bytes[0]).status_code == 409


def test_a_checkpoint_is_written_once(root: Path) -> None:
    manifest = write(root, 1, seed=5)
    assert write(root, 1, seed=5) == manifest
    with pytest.raises(CheckpointExists, match="a version is written once"):
        write(root, 1, seed=6)
    (root / "run" / "1" / MARKER_FILE).unlink()
    with pytest.raises(CheckpointExists, match="is no complete checkpoint"):
        write(root, 1, seed=5)
    assert [p.name for p in (root / "run").iterdir()] == ["1"], "parts were left"
    for template in (f"{root}/run", "run/{version}"):
        with pytest.raises(ValueError, match=r"must be absolute and contain \{version\}"):
            checkpoint.write(template, 1, torch_state(MODELS["tiny"], 1))
