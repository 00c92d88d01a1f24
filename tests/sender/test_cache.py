"""State dict -> buckets and manifest: every dtype, shape and memory layout comes back byte for byte."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from rlfleet.api.manifest import DTYPES, Manifest, safetensors_header
from rlfleet.sender import InvalidStateDict, LayoutChanged, VersionGoesBackwards, WeightSender, cache, layout
from tests.sender.caller import weights

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes as a tensor of this dtype; bool keeps to 0 and 1."""
    made = torch.Generator().manual_seed(seed)
    count = DTYPES[dtype][0]
    for n in shape:
        count *= n
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=made).to(torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


STATE_DICTS = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES, st.integers(0, 2**32), st.booleans()),
    min_size=1,
    max_size=12,
).filter(lambda d: any(0 not in shape for _, shape, _, _ in d.values()))


def build(state: dict[str, Any], bucket_bytes: int = 4096) -> cache.Weights:
    """Buckets and manifest of a first publish."""
    return cache.build(
        1,
        layout.check(state),
        state.__getitem__,
        layout_changed=False,
        bucket_bytes=bucket_bytes,
        spare=cache.SpareBuffers(),
    )


def raw(t: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(STATE_DICTS, st.integers(1, 200))
def test_round_trip(described: dict[str, tuple[str, tuple[int, ...], int, bool]], bucket_bytes: int) -> None:
    state = {}
    for name, (dtype, shape, seed, turned) in described.items():
        t = tensor(dtype, shape, seed)
        state[name] = t.transpose(0, -1) if turned and t.dim() > 1 else t
    made = build(state, bucket_bytes)
    manifest = made.manifest
    # It survives the wire, where it is checked again.
    assert Manifest.model_validate_json(manifest.model_dump_json(by_alias=True)) == manifest
    assert {t.name for t in manifest.tensors} == set(state)
    for entry in manifest.tensors:
        t = state[entry.name]
        got = bytes(made.view(entry.bucket)[entry.offset : entry.offset + entry.nbytes])
        assert got == raw(t)
        assert entry.hash == xxhash.xxh3_128_hexdigest(got)
        assert (entry.dtype, entry.shape) == (str(t.dtype).removeprefix("torch."), tuple(t.shape))
    for index, size in enumerate(manifest.bucket_bytes):
        assert 0 < size == made.buckets[index].numel()
        filled = [t for t in manifest.bucket(index) if t.nbytes]
        # Over the limit only with a single tensor that would not fit anywhere.
        assert size <= bucket_bytes or len(filled) == 1


@settings(deadline=None, max_examples=30)
@given(STATE_DICTS, st.integers(1, 200), st.integers(1, 200))
def test_the_digest_does_not_depend_on_the_cut(
    described: dict[str, tuple[str, tuple[int, ...], int, bool]], one: int, other: int
) -> None:
    state = {name: tensor(dtype, shape, seed) for name, (dtype, shape, seed, _) in described.items()}
    backwards = dict(reversed(state.items()))
    assert build(state, one).digest == build(state, other).digest == build(backwards, one).digest


def test_a_bucket_with_its_header_is_a_safetensors_file() -> None:
    state = weights(5)
    made = build(state)
    assert len(made.buckets) > 1
    for index in range(len(made.buckets)):
        loaded = load(safetensors_header(made.manifest.bucket(index)) + bytes(made.view(index)))
        for name, t in loaded.items():
            assert raw(t) == raw(state[name])


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    made = build({"a": torch.zeros(10), "big": torch.zeros(100), "b": torch.zeros(10)}, bucket_bytes=64)
    assert [t.bucket for t in made.manifest.tensors] == [0, 1, 2]
    assert made.manifest.bucket_bytes == (40, 400, 40)


def test_tied_tensors_travel_under_both_names() -> None:
    shared = torch.nn.Parameter(torch.randn(4, 4))
    made = build({"embed": shared, "head": shared})
    embed, head = made.manifest.tensors
    assert embed.hash == head.hash
    assert made.manifest.total_bytes == 2 * 64


def test_the_bytes_are_a_copy(sender: WeightSender) -> None:
    state = weights()
    before = {name: raw(t) for name, t in state.items()}
    manifest = sender.publish(1, state)
    for t in state.values():
        t.zero_()
    assert {t.name: t.hash for t in manifest.tensors} == {n: xxhash.xxh3_128_hexdigest(b) for n, b in before.items()}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "state dict is empty"),
        ({"w": torch.empty(0)}, "state dict is empty"),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, "'w': dtype complex128"),
        ({"ok": torch.zeros(1), "_extra_state": {"a": 1}}, "'_extra_state' is no tensor"),
        ({"s": torch.eye(3).to_sparse()}, "'s': only dense"),
        ({"m": torch.empty(3, device="meta")}, "'m' is on the meta device"),
        ({"n" * 513: torch.zeros(1)}, "tensor name 'nnn"),
        ({3: torch.zeros(1)}, "tensor name '3'"),
        ([torch.zeros(1)], "state dict .* is needed, not list"),
    ],
)
def test_what_cannot_be_carried_is_named(sender: WeightSender, state: Any, says: str) -> None:
    with pytest.raises(InvalidStateDict, match=says):
        sender.publish(1, state)


def test_nan_is_legal_and_said(sender: WeightSender, caplog: pytest.LogCaptureFixture, operator: Any) -> None:
    with caplog.at_level(logging.WARNING, "rlfleet.sender"):
        sender.publish(
            1,
            {
                "fine": torch.zeros(3),
                "bad": torch.tensor([1.0, float("nan")]),
                "small": torch.tensor([float("nan")]).to(torch.float8_e5m2),
                "ints": torch.zeros(2, dtype=torch.int8),
            },
        )
    assert "NaN in 2 of 4 tensors" in caplog.text
    status = operator.status()
    assert status.cache is not None
    assert status.cache.nan_tensors == ("bad", "small")
    assert "rlfleet_sender_nan_tensors 2.0" in operator.http.get(sender.url + "/metrics").text


def test_another_layout_is_refused_unless_meant(sender: WeightSender, operator: Any) -> None:
    sender.publish(1, {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)})
    with pytest.raises(LayoutChanged) as changed:
        sender.publish(2, {"a": torch.zeros(5), "b": torch.zeros(4, dtype=torch.float16), "d": torch.zeros(4)})
    for words in (
        "missing: c",
        "new: d",
        "a (was float32[4], is float32[5])",
        "b (was float32[4], is float16[4])",
        "allow_layout_change=True",
    ):
        assert words in str(changed.value)
    assert operator.status().cache.version == 1
    assert not operator.status().cache.layout_changed
    sender.publish(2, {"a": torch.zeros(5)}, allow_layout_change=True)
    assert operator.status().cache.version == 2
    assert operator.status().cache.layout_changed


def test_a_version_below_the_one_held_is_refused_unless_meant(sender: WeightSender, operator: Any) -> None:
    sender.publish(5, weights(5))
    with pytest.raises(VersionGoesBackwards, match="version 4 is below version 5"):
        sender.publish(4, weights(4))
    assert operator.status().cache.version == 5
    sender.publish(4, weights(4), allow_rollback=True)
    assert operator.status().cache.version == 4


def test_the_same_version_with_other_bytes_is_another_identity_and_said(
    sender: WeightSender, operator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = sender.publish(1, weights(1))
    assert sender.publish(1, weights(1)) == first
    assert "other bytes" not in caplog.text
    with caplog.at_level(logging.WARNING, "rlfleet.sender"):
        second = sender.publish(1, weights(2))
    assert first.digest != second.digest
    assert "version 1 is published again with other bytes" in caplog.text
    assert operator.status().cache.manifest_digest == second.digest


@pytest.mark.parametrize("version", [-2, 2**53 + 1, True, 1.0, "1"])
def test_versions_are_checked(sender: WeightSender, version: Any) -> None:
    with pytest.raises(ValueError, match="version must be an integer"):
        sender.publish(version, weights())


def test_the_manifest_is_served(sender: WeightSender, operator: Any) -> None:
    manifest = sender.publish(-1, weights())
    answer = operator.get(f"/v1/manifest/{manifest.digest}")
    assert Manifest.model_validate(json.loads(answer.content)) == manifest
    assert operator.get("/v1/manifest/sha256:" + "0" * 64).status_code == 404
