"""Smaller buckets: the same tensors under the same digest, in memory that is shared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.manifest import MAX_BUCKETS, Manifest
from rlfleet.sender import layout
from rlfleet.sender.cache import SpareBuffers, Weights, build
from rlfleet.sender.errors import Refused
from rlfleet.sender.recut import recut

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def weights(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> Weights:
    return build(
        1,
        layout.check(tensors),
        tensors.__getitem__,
        layout_changed=False,
        bucket_bytes=bucket_bytes,
        spare=SpareBuffers(),
    )


def bytes_of(w: Weights) -> dict[str, bytes]:
    return {t.name: bytes(w.view(t.bucket)[t.offset : t.offset + t.nbytes]) for t in w.manifest.tensors}


@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_any_cut_carries_the_same_bytes_under_the_same_name(
    given_tensors: list[tuple[tuple[int, ...], torch.dtype]], published: int, wanted: int
) -> None:
    tensors = {f"t{i}": torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(given_tensors)}
    tensors["last"] = torch.ones(3)
    whole = weights(tensors, published)
    cut = recut(whole, wanted)
    # The model checks that every bucket is covered without a hole, and that the digest is the tensors'.
    Manifest.model_validate_json(cut.manifest.model_dump_json(by_alias=True))
    assert cut.digest == whole.digest
    assert bytes_of(cut) == bytes_of(whole)
    assert [b.numel() for b in cut.buckets] == list(cut.manifest.bucket_bytes)
    assert all(size for size in cut.manifest.bucket_bytes)
    for index, size in enumerate(cut.manifest.bucket_bytes):
        carrying = [t for t in cut.manifest.bucket(index) if t.nbytes]
        assert size <= wanted or len(carrying) == 1
        for t in carrying:
            assert t.offset % tensors[t.name].element_size() == 0  # readers of safetensors want them aligned


def test_a_cut_copies_nothing_and_is_made_once() -> None:
    whole = weights({f"t{i}": torch.full((64,), float(i)) for i in range(8)}, 2**20)
    assert recut(whole, None) is whole
    assert recut(whole, 2**20) is whole
    cut = recut(whole, 512)
    assert recut(whole, 512) is cut
    assert (len(whole.buckets), len(cut.buckets)) == (1, 4)
    assert cut.buckets[1].data_ptr() == whole.buckets[0].data_ptr() + 512


def test_a_tensor_larger_than_the_bucket_goes_by_itself() -> None:
    cut = recut(weights({"a": torch.ones(4), "big": torch.ones(100), "b": torch.ones(4)}, 2**20), 64)
    assert [[t.name for t in cut.manifest.bucket(i)] for i in range(len(cut.buckets))] == [["a"], ["big"], ["b"]]


def test_more_buckets_than_a_manifest_can_have_are_refused() -> None:
    many = weights({f"t{i}": torch.ones(1, dtype=torch.int8) for i in range(MAX_BUCKETS + 1)}, 2**30)
    with pytest.raises(Refused, match=r"spec.transport.bucketMiB would make 65537 buckets, 65536 are possible"):
        recut(many, 1)


def test_the_sender_tells_its_largest_tensor() -> None:
    report = weights({"a": torch.ones(4), "big": torch.ones(100)}, 64).report()
    assert (report.largest_tensor, report.largest_tensor_bytes) == ("big", 400)
