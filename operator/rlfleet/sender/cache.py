"""State dict -> complete weights in CPU buckets, with their manifest.

Invariants:
- one flat uint8 buffer per bucket, which both transports read: pushed as it is, or broadcast as one tensor;
- a tensor's bytes are exactly those of its contiguous CPU copy: no dtype is converted on the way;
- one tensor at a time is asked for, so a source that gathers never has more than one whole tensor beside the buckets.

torch is imported only where a tensor is there: the rest of the package works without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from rlfleet.api import manifest as mf
from rlfleet.api import wire
from rlfleet.sender.layout import NAMED, Layout, Slice, cut

if TYPE_CHECKING:
    import torch

DEFAULT_BUCKET_BYTES = 512 * 2**20
#: Elements looked at for NaN at a time: bounds the memory that looking takes.
_NAN_ELEMENTS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Weights:
    """Complete weights of one version. ``buckets`` are CPU uint8 tensors; nobody writes to them while they are held."""

    version: int
    manifest: mf.Manifest
    buckets: tuple[torch.Tensor, ...]
    nan_tensors: tuple[str, ...]
    layout_changed: bool
    build_ms: int
    #: The CUDA device that was current for the publisher; None without CUDA.
    cuda_device: int | None = None
    #: The same in smaller buckets, by their size (sender.recut).
    cuts: dict[int, Weights] = field(default_factory=dict, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """The name of these bytes."""
        return self.manifest.digest

    def view(self, index: int) -> memoryview:
        """The bytes of one bucket's data region, without a copy."""
        return _bytes(self.buckets[index])

    def report(self) -> wire.SenderCache:
        """What the sender says of these weights."""
        largest = max(self.manifest.tensors, key=lambda t: t.nbytes)
        return wire.SenderCache(
            version=self.version,
            manifest_digest=self.digest,
            total_bytes=self.manifest.total_bytes,
            tensors=len(self.manifest.tensors),
            buckets=len(self.manifest.bucket_bytes),
            largest_tensor=largest.name,
            largest_tensor_bytes=largest.nbytes,
            nan_tensors=self.nan_tensors[:NAMED],
            layout_changed=self.layout_changed,
        )


class SpareBuffers:
    """Buckets of weights that nobody reads any more, for the next publish: fresh memory costs a page fault each.

    Not thread-safe: the publisher owns it.
    """

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []

    def give(self, buckets: Sequence[torch.Tensor]) -> None:
        """Take buckets back. Nothing may read them from now on."""
        self._spare = list(buckets)

    def take(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """One uint8 buffer per size, out of what was given back where a size fits exactly."""
        import torch

        spare, self._spare = self._spare, []
        taken: list[torch.Tensor] = []
        for size in sizes:
            at = next((i for i, t in enumerate(spare) if t.numel() == size), None)
            taken.append(torch.empty(size, dtype=torch.uint8) if at is None else spare.pop(at))
        return tuple(taken)


def build(
    version: int,
    layout: Layout,
    fetch: Callable[[str], torch.Tensor],
    *,
    layout_changed: bool,
    bucket_bytes: int,
    spare: SpareBuffers,
    cuda: bool = False,
) -> Weights:
    """Copy tensors into buckets and name their bytes. ``cuda``: remember the publisher's current CUDA device.

    ``fetch`` gives a tensor of the layout by name; it is called once for each, in the order of ``layout.cut``.
    ``layout_changed``: the layout is not that of the first publish, and the sender says so.
    """
    import torch

    started = time.monotonic()
    slices, sizes = cut(layout, bucket_bytes)
    buckets = spare.take(sizes)
    views = [_bytes(b) for b in buckets]
    entries: list[mf.TensorEntry] = []
    with_nan: list[str] = []
    for s in slices:
        if _has_nan(_copy(fetch(s.name), buckets[s.bucket], s)):
            with_nan.append(s.name)
        entries.append(
            mf.TensorEntry(
                name=s.name,
                dtype=s.dtype,
                shape=s.shape,
                hash=xxhash.xxh3_128_hexdigest(views[s.bucket][s.offset : s.offset + s.nbytes]),
                bucket=s.bucket,
                offset=s.offset,
            )
        )
    made = mf.Manifest(
        tensors=tuple(entries), bucket_bytes=tuple(sizes), digest=mf.manifest_digest("xxh3-128", entries)
    )
    return Weights(
        version=version,
        manifest=made,
        buckets=buckets,
        nan_tensors=tuple(with_nan),
        layout_changed=layout_changed,
        build_ms=int((time.monotonic() - started) * 1000),
        cuda_device=torch.cuda.current_device() if cuda and torch.cuda.is_available() else None,
    )


def _bytes(bucket: torch.Tensor) -> memoryview:
    flat: Any = bucket.numpy()
    return memoryview(flat)


def _copy(tensor: torch.Tensor, bucket: torch.Tensor, s: Slice) -> torch.Tensor:
    """Copy a tensor to its place, whatever strides and device it has; what was copied."""
    copied = bucket[s.offset : s.offset + s.nbytes].view(tensor.dtype).view(s.shape)
    copied.copy_(tensor.detach())
    return copied


def _has_nan(tensor: torch.Tensor) -> bool:
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return any(bool(torch.isnan(part.float() if part.element_size() == 1 else part).any()) for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() <= _NAN_ELEMENTS:
        yield tensor
    else:
        flat = tensor.reshape(-1)
        yield from (flat[at : at + _NAN_ELEMENTS] for at in range(0, flat.numel(), _NAN_ELEMENTS))
