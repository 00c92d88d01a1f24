"""The part of the lock that an image gets."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from e2e.node.images import SOURCES, digest_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def subset() -> ModuleType:
    spec = importlib.util.spec_from_file_location("subset", ROOT / "images" / "subset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK = """aiohttp==1 \\
    --hash=sha256:aa
    # via rlfleet (pyproject.toml)
yarl==2 \\
    --hash=sha256:bb
    # via
    #   aiohttp
    #   other
idna==3 \\
    --hash=sha256:cc
    # via yarl
other==4 \\
    --hash=sha256:dd
    # via rlfleet (pyproject.toml)
"""


def test_a_root_brings_all_that_it_rests_on_and_nothing_else(subset: ModuleType) -> None:
    found = subset.select(LOCK, {"aiohttp"})
    assert [text.split("==")[0] for text in found] == ["aiohttp", "yarl", "idna"]
    assert all("--hash=sha256:" in text for text in found)


def test_a_root_that_is_not_locked_is_an_error(subset: ModuleType) -> None:
    with pytest.raises(KeyError, match="torch"):
        subset.select(LOCK, {"torch", "aiohttp"})


def test_the_operator_s_image_has_its_dependencies_and_no_torch(subset: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = (ROOT / "requirements.lock").read_text()
    (extras,) = re.findall(r"subset\.py (.*)> operator\.lock", (ROOT / "Dockerfile").read_text())
    assert extras.split() == ["--extra", "otel"], "what --otlp-endpoint needs is there"
    names = {text.split("==")[0] for text in subset.select(lock, subset.roots(project, ["otel"]))}
    assert subset.roots(project, []) | {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= names
    assert not names & {"torch", "numpy", "ray", "pytest", "mypy"}
    assert "torch" in {text.split("==")[0] for text in subset.select(lock, subset.roots(project, ["torch"]))}


def test_an_image_is_built_anew_when_anything_changes_that_the_dockerfile_copies(tmp_path: Path) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    assert copied
    for name in copied:
        assert any(name == s or name.startswith(f"{s}/") for s in SOURCES), name
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "a.py").write_text("1")
    seen = {digest_of(tmp_path, "base")}
    (tmp_path / "operator" / "a.py").write_text("2")
    seen.add(digest_of(tmp_path, "base"))
    (tmp_path / "operator" / "a.py").rename(tmp_path / "operator" / "b.py")
    seen |= {digest_of(tmp_path, "base"), digest_of(tmp_path, "another base")}
    assert len(seen) == 4
    (tmp_path / "elsewhere").write_text("3")
    assert digest_of(tmp_path, "base") in seen
