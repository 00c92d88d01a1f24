"""The documentation as a site: built without a warning, every page in a menu, links that leave docs/ named as files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site")],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the site is made of, and what its pages link to."""
    for name in ("mkdocs.yml", "docs"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    for name in (
        "charts",
        "operator",
        "e2e",
        "Dockerfile",
        "README.md",
        "CONTRIBUTING.md",
        "tests",
        "bench",
        "crds",
        "config",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_the_site_is_built_without_a_warning_and_holds_every_page(copied: Path) -> None:
    done = build(copied)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (copied / "site/index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs")
        if path.name != "template.md":
            target = path.with_name("index.md") if path.name == "README.md" else path
            assert (copied / "site" / target.with_suffix(".html")).exists(), f"{path} is not in the site"
            assert f'href="{target.with_suffix(".html")}"' in home, f"no menu leads to {path}"
    assert "<code>Dockerfile</code>" in (copied / "site/guides/real-node.html").read_text()
    assert "fonts.googleapis" not in home


@pytest.mark.parametrize(
    ("link", "complaint"),
    [("[x](nowhere.md)", "nowhere.md"), ("[x](concepts.md#nothing)", "nothing"), ("[x](../nowhere)", "nowhere")],
    ids=["page", "anchor", "file of the repository"],
)
def test_a_dead_link_is_an_error(copied: Path, link: str, complaint: str) -> None:
    page = copied / "docs/promises.md"
    page.write_text(page.read_text() + f"\n{link}\n")
    done = build(copied)
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr


def test_a_page_without_a_title_is_an_error(copied: Path) -> None:
    (copied / "docs/guides/new.md").write_text("Words.\n")
    done = build(copied)
    assert done.returncode != 0
    assert "guides/new.md" in done.stdout + done.stderr
