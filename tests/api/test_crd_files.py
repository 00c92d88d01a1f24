"""Generated files equal the models, and every schema is described and bounded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from rlfleet.api import crdgen
from rlfleet.api.conditions import Reason
from rlfleet.api.schema import UnboundedField, UndescribedField, structural_schema

ROOT = Path(__file__).resolve().parents[2]
KINDS = pytest.mark.parametrize("kind", crdgen.KINDS, ids=lambda kind: kind.name)


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}.*")


def ours(kind: crdgen.Kind) -> Iterator[tuple[str, dict[str, Any]]]:
    properties = crdgen.schema(kind)["properties"]
    for part in [p for p in ("spec", "status") if p in properties]:
        yield from nodes(properties[part], part)


def generator(root: Path, mode: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlfleet.api.crdgen", mode, "--root", str(root)]
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "operator")}, capture_output=True, text=True, timeout=120, check=False
    )


def test_committed_files_equal_the_generators_output() -> None:
    for path, text in crdgen.files().items():
        assert (ROOT / path).read_text() == text, f"{path} is stale: run `make generate`"


def test_nothing_else_lies_among_the_generated_crds() -> None:
    expected = {kind.file for kind in crdgen.KINDS}
    for folder, more in (("crds", {"kustomization.yaml"}), ("charts/rlfleet/crds", set[str]())):
        assert {path.name for path in (ROOT / folder).iterdir()} == expected | more


def test_the_command_writes_what_it_then_finds_correct_and_names_what_is_stale(tmp_path: Path) -> None:
    written = generator(tmp_path, "--write")
    assert written.returncode == 0, written.stderr
    assert {line.removeprefix("wrote: ") for line in written.stdout.splitlines()} == set(crdgen.files())
    checked = generator(tmp_path, "--check")
    assert (checked.returncode, checked.stdout) == (0, "")

    stale = tmp_path / "crds/rlfleet.dev_syncrounds.yaml"
    stale.write_text(stale.read_text() + "# edited\n")
    checked = generator(tmp_path, "--check")
    assert checked.returncode == 1
    assert checked.stdout == "differs from the models: crds/rlfleet.dev_syncrounds.yaml\n"
    assert "# edited" in stale.read_text(), "--check must not write"


@KINDS
def test_files_are_small_and_free_of_aliases(kind: crdgen.Kind) -> None:
    text = crdgen.crd_yaml(kind)
    assert len(text.encode()) < 256 * 1024
    assert "&id" not in text, "YAML aliases are unreadable and some tools refuse them"
    assert yaml.safe_load(text) == crdgen.crd(kind)


@KINDS
def test_every_field_says_what_it_means(kind: crdgen.Kind) -> None:
    for path, schema in ours(kind):
        description = schema.get("description", "")
        assert len(description) > 3, path
        assert description[0].isupper(), path
        assert description.rstrip().endswith("."), path


@KINDS
def test_every_field_is_bounded(kind: crdgen.Kind) -> None:
    for path, schema in ours(kind):
        assert "$ref" not in schema, path
        assert "anyOf" not in schema, path
        match schema.get("type"):
            case "string":
                assert "maxLength" in schema or "enum" in schema, path
            case "integer":
                assert {"minimum", "maximum", "format"} <= schema.keys(), path
            case "array":
                assert "maxItems" in schema, path
                assert "x-kubernetes-list-type" in schema, path
            case "object" if "additionalProperties" in schema:
                assert "maxProperties" in schema, path
            case None:
                assert schema["x-kubernetes-int-or-string"] is True, path


@KINDS
def test_every_rule_has_a_message(kind: crdgen.Kind) -> None:
    found = [r for _, schema in nodes(crdgen.schema(kind), "") for r in schema.get("x-kubernetes-validations", ())]
    assert found
    for each in found:
        assert each["message"]
        assert each["reason"] in {"FieldValueInvalid", "FieldValueRequired", "FieldValueForbidden"}


@KINDS
def test_status_has_no_defaults(kind: crdgen.Kind) -> None:
    # The server would write "not known yet" as a value, and every comparison of status would see a change.
    for path, schema in ours(kind):
        assert not path.startswith("status") or "default" not in schema, path


@KINDS
def test_every_printer_column_points_at_a_field(kind: crdgen.Kind) -> None:
    known = {path.replace("[]", "") for path, _ in ours(kind)} | {"metadata.creationTimestamp"}
    for column in kind.columns:
        path = column.path.removeprefix(".")
        if path.startswith("status.conditions["):
            path = "status.conditions." + path.rsplit(".", 1)[1]
        assert path.replace("[0]", "").replace("[*]", "") in known, column


def test_reference_pages_have_every_field_rule_and_reason() -> None:
    page = (ROOT / "docs/reference/crds.md").read_text()
    for kind in crdgen.KINDS:
        for path, schema in ours(kind):
            field = path.partition(".")[2]
            if field and not field.endswith(("[]", "*")) and ".template.spec." not in path:
                assert f"| `{field}`" in page, path
            for each in schema.get("x-kubernetes-validations", ()):
                assert each["message"] in page
    words = (ROOT / "docs/reference/conditions.md").read_text()
    assert all(f"| `{reason.value}` | {reason.meaning} |" in words for reason in Reason)


class Unbounded(BaseModel):
    """A model with a text of any length."""

    text: str = Field(description="A text.")


class Undescribed(BaseModel):
    """A model with a field that nobody explained."""

    count: int = Field(ge=0, le=1)


def test_the_generator_refuses_fields_without_bound_or_description() -> None:
    with pytest.raises(UnboundedField, match=r"Unbounded\.text"):
        structural_schema(Unbounded, defaults=True)
    with pytest.raises(UndescribedField, match=r"Undescribed\.count"):
        structural_schema(Undescribed, defaults=True)
