"""The manifest: a name for bytes that does not depend on buckets, and that no inconsistent object can carry."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load

from rlfleet.api.manifest import DTYPES, Manifest, TensorEntry, manifest_digest, safetensors_header

NAMES = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
HASHES = st.text("0123456789abcdef", min_size=32, max_size=32)
Tensor = tuple[str, str, tuple[int, ...], str]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    return [(name, draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES), draw(HASHES)) for name in draw(NAMES)]


def pack(rows: list[Tensor], cuts: list[bool]) -> Manifest:
    """Lay tensors one after another; a True starts the next bucket."""
    entries: list[TensorEntry] = []
    sizes = [0]
    for (name, dtype, shape, digest), cut in zip(rows, cuts, strict=True):
        if cut and entries:
            sizes.append(0)
        entry = TensorEntry(name=name, dtype=dtype, shape=shape, hash=digest, bucket=len(sizes) - 1, offset=sizes[-1])
        sizes[-1] += entry.nbytes
        entries.append(entry)
    digest = manifest_digest("xxh3-128", entries)
    return Manifest(tensors=tuple(entries), bucket_bytes=tuple(sizes), digest=digest)


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[Tensor], Manifest]:
    rows = draw(tensors())
    return rows, pack(rows, draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))


@given(packed(), st.data())
def test_the_digest_depends_neither_on_buckets_nor_on_order(
    made: tuple[list[Tensor], Manifest], data: st.DataObject
) -> None:
    rows, manifest = made
    shuffled = data.draw(st.permutations(rows))
    cuts = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert pack(shuffled, cuts).digest == manifest.digest


@given(packed(), st.data())
def test_the_digest_depends_on_each_tensors_name_dtype_shape_and_hash(
    made: tuple[list[Tensor], Manifest], data: st.DataObject
) -> None:
    rows, manifest = made
    at = data.draw(st.integers(0, len(rows) - 1))
    name, dtype, shape, digest = rows[at]
    other: Tensor = data.draw(
        st.one_of(
            st.just((name + "x", dtype, shape, digest)),
            st.sampled_from(sorted(DTYPES)).map(lambda d: (name, d, shape, digest)),
            SHAPES.map(lambda s: (name, dtype, s, digest)),
            HASHES.map(lambda h: (name, dtype, shape, h)),
        )
    )
    assume(other != rows[at] and other[0] not in {row[0] for row in rows[:at] + rows[at + 1 :]})
    changed = [*rows[:at], other, *rows[at + 1 :]]
    assert pack(changed, [False] * len(rows)).digest != manifest.digest


@given(packed())
def test_a_manifest_survives_the_wire_and_accounts_for_every_byte(made: tuple[list[Tensor], Manifest]) -> None:
    _, manifest = made
    assert Manifest.model_validate_json(manifest.model_dump_json(by_alias=True)) == manifest
    assert manifest.total_bytes == sum(t.nbytes for t in manifest.tensors)
    assert tuple(t for i in range(len(manifest.bucket_bytes)) for t in manifest.bucket(i)) == manifest.tensors


def wire() -> dict[str, Any]:
    rows: list[Tensor] = [
        ("a", "float32", (2, 3), "0" * 32),
        ("b", "int8", (5,), "1" * 32),
        ("c", "bool", (), "2" * 32),
    ]
    made: dict[str, Any] = json.loads(pack(rows, [False, False, True]).model_dump_json(by_alias=True))
    return made


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("tensors", 1, "offset"), 23, "leaves a hole or overlaps (expected 24)"),
        (("tensors", 1, "offset"), 25, "leaves a hole or overlaps (expected 24)"),
        (("tensors", 0, "bucket"), 1, "tensor 'b': bucket 0 is out of order or unknown"),
        (("tensors", 2, "bucket"), 2, "bucket 2 is out of order or unknown"),
        (("tensors", 1, "name"), "a", "tensor 'a' appears twice"),
        (("tensors", 1, "dtype"), "complex128", "dtype 'complex128' can not be carried"),
        (("tensors", 1, "shape"), [-5], "negative size in shape [-5]"),
        (("tensors", 1, "shape"), [6], "bucketBytes do not equal the bytes"),
        (("tensors", 1, "hash"), "3" * 32, "digest does not match the tensors"),
        (("tensors", 1, "hash"), "xyz", "String should match pattern"),
        (("bucketBytes",), [29], "out of order or unknown"),
        (("bucketBytes",), [29, 2], "bucketBytes do not equal the bytes"),
        (("digest",), "sha256:" + "0" * 64, "digest does not match the tensors"),
        (("hashAlgorithm",), "md5", "Input should be 'xxh3-128'"),
        (("tensors",), [], "at least 1 item"),
        (("surprise",), 1, "Extra inputs are not permitted"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_no_inconsistent_manifest_exists(path: tuple[str | int, ...], value: Any, fault: str) -> None:
    body = copy.deepcopy(wire())
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(ValidationError) as refused:
        Manifest.model_validate(body)
    assert fault in str(refused.value)


def test_tensors_of_an_earlier_bucket_cannot_follow() -> None:
    body = wire()
    body["tensors"] = [body["tensors"][2], body["tensors"][0], body["tensors"][1]]
    with pytest.raises(ValidationError, match="bucket 0 is out of order"):
        Manifest.model_validate(body)


def test_names_in_any_script_get_the_same_digest_everywhere() -> None:
    # The digest goes through escaped JSON, so it cannot depend on a platform's text encoding.
    entry = TensorEntry(name="gewicht.größe", dtype="float32", shape=(1,), hash="0" * 32, bucket=0, offset=0)
    body = rb'["xxh3-128",[["gewicht.gr\u00f6\u00dfe","float32",[1],"00000000000000000000000000000000"]]]'
    assert manifest_digest("xxh3-128", [entry]) == "sha256:" + hashlib.sha256(body).hexdigest()


def test_a_bucket_behind_its_header_is_a_safetensors_file() -> None:
    rows: list[Tensor] = [
        ("w", "float32", (2, 2), "0" * 32),
        ("flag", "bool", (), "1" * 32),
        ("b", "int16", (3,), "2" * 32),
    ]
    manifest = pack(rows, [False] * 3)
    data = bytes(range(manifest.total_bytes - 7)) + bytes([0] * 7)
    header = safetensors_header(manifest.bucket(0))
    assert len(header) % 8 == 0
    read = load(header + data)
    assert {name: (a.dtype.name, a.shape) for name, a in read.items()} == {
        "w": ("float32", (2, 2)),
        "flag": ("bool", ()),
        "b": ("int16", (3,)),
    }
    assert read["w"].tobytes() == data[:16]
    assert read["b"].tobytes() == data[17:23]
