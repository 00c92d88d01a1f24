"""The chart's README and the kustomize base are made from the chart, and up to date."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from e2e.chart import __main__ as command
from e2e.chart import base, readme
from e2e.chart.readme import CHART, UndocumentedError, comments, values
from e2e.cluster.programs import ensure_programs
from rlfleet import __version__
from rlfleet.api import crdgen, labels
from tests.chart.kit import chart

ROOT = Path(__file__).resolve().parents[2]


def test_committed_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().out


def test_the_command_names_what_is_stale_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"--root={tmp_path}"
    assert command.main(["--write", root]) == 0
    assert command.main(["--check", root]) == 0
    stale = tmp_path / base.FOLDER / "install.yaml"
    stale.write_text(stale.read_text() + "# edited\n")
    capsys.readouterr()
    assert command.main(["--check", root]) == 1
    assert capsys.readouterr().out == f"differs from the chart: {base.FOLDER}/install.yaml\n"
    assert "# edited" in stale.read_text(), "--check must not write"


def test_a_comment_belongs_to_the_key_right_below_it() -> None:
    text = "# about a\n# and more\na: 1\n\n# lost\n\nb:\n  # about c\n  c: []\nd: 2\n"
    assert comments(text) == {"a": "about a and more", "b.c": "about c"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n", "a has no comment"),
        ("# x\na: 1\n# y\nb: 1\n", "values.schema.json lacks b"),
        ("{}\n", "values.yaml lacks a"),
    ],
    ids=["comment", "schema", "default"],
)
def test_a_value_that_is_not_described_is_an_error(text: str, words: str) -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    with pytest.raises(UndocumentedError, match=re.escape(words)):
        values(text, schema)


def test_every_object_of_the_schema_is_closed_or_free_form() -> None:
    def check(node: object, path: str) -> None:
        if isinstance(node, dict):
            if node.get("properties"):
                assert node.get("additionalProperties") is False, path
            for key, value in node.items():
                check(value, f"{path}/{key}")

    check(json.loads((CHART / "values.schema.json").read_text()), "")


def test_readme_has_a_row_for_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    page = readme.page()
    found = values((CHART / "values.yaml").read_text(), schema)
    assert len(found) > 60
    for value in found:
        assert f"| `{value.path}` |" in page


def test_crds_are_applied_by_hand_with_one_command_everywhere() -> None:
    # Without the flag a field that Helm wrote, and this release changes, is refused as a conflict.
    pages = [CHART / "README.md", CHART / "templates/NOTES.txt", *sorted((ROOT / "docs").rglob("*.md"))]
    commands = [c for p in pages for c in re.findall(r"rlfleet crds \|[^\n`]*", p.read_text())]
    assert len(commands) >= 3
    assert set(commands) == {"rlfleet crds | kubectl apply --server-side --force-conflicts -f -"}


def test_the_base_installs_what_the_chart_does(tmp_path: Path) -> None:
    objects = list(yaml.safe_load_all(base.files()[f"{base.FOLDER}/install.yaml"]))
    seen = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert seen[0] == ("Namespace", base.NAMESPACE)
    assert sorted(seen[1:]) == sorted((o["kind"], o["metadata"]["name"]) for o in chart(tmp_path, None, "--no-hooks"))
    text = (ROOT / base.FOLDER / "install.yaml").read_text()
    assert "Helm" not in text
    assert "helm.sh" not in text


def test_chart_metadata_names_what_is_in_it() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert meta["appVersion"] == meta["version"] == __version__
    listed = yaml.safe_load(meta["annotations"]["artifacthub.io/crds"])
    assert {(c["kind"], c["name"], c["version"]) for c in listed} == {
        (k.name, f"{k.plural}.{labels.GROUP}", labels.VERSION) for k in crdgen.KINDS
    }
    (image,) = yaml.safe_load(meta["annotations"]["artifacthub.io/images"])
    assert image["image"] == f"rlfleet/operator:{__version__}"
    examples = yaml.safe_load(meta["annotations"]["artifacthub.io/crdsExamples"])
    names = ("pipeline", "pool", "round", "demand")
    assert examples == [yaml.safe_load((ROOT / f"docs/examples/{name}.yaml").read_text()) for name in names]
    assert {e["kind"] for e in examples} == {k.name for k in crdgen.KINDS}


def test_helm_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    copy = tmp_path / "rlfleet"
    shutil.copytree(CHART, copy)
    done = subprocess.run(
        [str(ensure_programs(["helm"])["helm"]), "lint", "--strict", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
