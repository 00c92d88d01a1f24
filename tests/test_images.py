"""The part of the lock that an image gets."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from e2e.node.images import SOURCES, digest_of, stage_ends

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


def test_the_last_step_of_each_stage_of_a_build_is_found_whether_it_was_made_or_taken_from_the_cache() -> None:
    said = """[1/9] STEP 1/2: FROM localhost/base AS locks
[1/9] STEP 2/2: RUN echo --> no step
--> Using cache ae34f5558054918472c76db3902a212fa5637535b9bbf37890e99c5cf3d6b26b
--> ae34f555805
[6/9] STEP 1/3: FROM localhost/base AS program
[6/9] STEP 2/3: WORKDIR /src
--> 1cf41e762eb
[6/9] STEP 3/3: COPY --from=locks /src /src
--> 80a228e557f
[9/9] STEP 1/1: FROM localhost/base AS engine
[9/9] COMMIT localhost/rlfleet/engine:dev
--> b641ebbae15
Successfully tagged localhost/rlfleet/engine:dev
b641ebbae15d7b505aba1bf8f7b970b1d9c131d1245ef8bdfe01835b44088795
"""
    assert stage_ends(said) == {"1": "ae34f555805", "6": "80a228e557f", "9": "b641ebbae15"}
