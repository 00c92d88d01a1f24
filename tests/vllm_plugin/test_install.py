"""``python -m rlfleet_vllm install``: a folder that is all an engine's PYTHONPATH needs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlfleet_vllm import __main__ as installing
from tests.netns import ROOT

#: Python as an engine has it: nothing of this checkout is on its path but the folder.
FOREIGN = """
import sys, importlib.metadata, importlib.util
assert importlib.util.find_spec("rlfleet") is None, "rlfleet itself is not needed"
(found,) = importlib.metadata.entry_points(group="vllm.general_plugins")
import rlfleet_vllm
assert found.load() is rlfleet_vllm.register
assert isinstance(rlfleet_vllm.ControlKey, type)
assert not {"torch", "vllm"} & set(sys.modules), "the API server's process loads neither for the middleware"
print(importlib.metadata.version("rlfleet-vllm"))
"""


def foreign(folder: Path) -> str:
    command = [sys.executable, "-S", "-c", FOREIGN]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_engine_finds_the_plugin_by_its_path_alone(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert installing.main(["install", str(tmp_path / "to")]) == 0
        assert installing.main(["install", str(tmp_path / "to")]) == 0, "again: an init container may be repeated"
    finally:
        os.umask(before)
    assert not list((tmp_path / "to").rglob("__pycache__"))
    assert foreign(tmp_path / "to") == installing.version()
    for path in (tmp_path / "to").rglob("*"):
        assert path.stat().st_mode & stat.S_IROTH, f"the engine runs as another user: {path}"


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert installing.main(["install", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_wheel_says_the_same_to_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = project["entry-points"]["vllm.general_plugins"]
    assert "[vllm.general_plugins]\n" + "".join(f"{k} = {v}\n" for k, v in said.items()) == installing.ENTRY_POINTS
