"""State dict -> complete weights in CPU buckets, with their manifest.

Invariants:
- one flat uint8 buffer per bucket, which both transports read: pushed as it is, or broadcast as one tensor;
- a tensor's bytes are exactly those of its contiguous CPU copy: no dtype is converted on the way;
- what cannot be carried is refused before a byte is copied, naming the tensor.

torch is imported only here and in ``broadcast``, and only when a tensor is there: the rest of the package works
without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from rlfleet.api import manifest as mf
from rlfleet.api import wire
from rlfleet.sender.errors import InvalidStateDict, LayoutChanged

if TYPE_CHECKING:
    import torch

DEFAULT_BUCKET_BYTES = 512 * 2**20
#: Elements looked at for NaN at a time: bounds the memory that looking takes.
_NAN_ELEMENTS = 16 * 2**20
_NAMED = 8

#: Name, dtype and shape of every tensor: what an engine is built for.
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor goes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    bucket: int
    offset: int


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

    @property
    def digest(self) -> str:
        """The name of these bytes."""
        return self.manifest.digest

    def view(self, index: int) -> memoryview:
        """The bytes of one bucket's data region, without a copy."""
        return _bytes(self.buckets[index])

    def report(self) -> wire.SenderCache:
        """What the sender says of these weights."""
        return wire.SenderCache(
            version=self.version,
            manifest_digest=self.digest,
            total_bytes=self.manifest.total_bytes,
            tensors=len(self.manifest.tensors),
            buckets=len(self.manifest.bucket_bytes),
            nan_tensors=self.nan_tensors[:_NAMED],
            layout_changed=self.layout_changed,
        )


def check(state_dict: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor, in order; InvalidStateDict names the first that cannot be carried."""
    import torch

    if not isinstance(state_dict, Mapping):
        raise InvalidStateDict(f"a state dict (name -> tensor) is needed, not {type(state_dict).__name__}")
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    total = 0
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 512:
            raise InvalidStateDict(f"tensor name {str(name)[:80]!r}: names are strings of 1 to 512 characters")
        if not isinstance(tensor, torch.Tensor):
            raise InvalidStateDict(f"{name!r} is no tensor but {type(tensor).__name__}: leave it out of the state dict")
        if hasattr(tensor, "full_tensor"):
            raise InvalidStateDict(
                f"tensor {name!r} is sharded (DTensor): publish the full state dict, for instance from "
                "get_model_state_dict(..., options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in mf.DTYPES:
            raise InvalidStateDict(
                f"tensor {name!r}: dtype {dtype} cannot be carried (can be: {', '.join(mf.DTYPES)}); convert it"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InvalidStateDict(f"tensor {name!r}: only dense tensors can be carried, not {tensor.layout}")
        if tensor.is_meta:
            raise InvalidStateDict(f"tensor {name!r} is on the meta device: it has no bytes")
        if tensor.dim() > 16:
            raise InvalidStateDict(f"tensor {name!r} has {tensor.dim()} dimensions, at most 16 can be carried")
        layout[name] = (dtype, tuple(tensor.shape))
        total += tensor.numel()
    if not total:
        raise InvalidStateDict("the state dict is empty: it holds no bytes that an engine could take over")
    if len(layout) > mf.MAX_TENSORS:
        raise InvalidStateDict(f"{len(layout)} tensors are more than the {mf.MAX_TENSORS} that a manifest can name")
    return layout


def layout_difference(first: Layout, now: Layout) -> str | None:
    """How ``now`` differs from ``first`` in words that name the tensors, or None."""
    parts: list[str] = []
    for word, names in (
        ("missing", [n for n in first if n not in now]),
        ("new", [n for n in now if n not in first]),
    ):
        if names:
            parts.append(f"{word}: {_some(names)}")
    changed = [f"{n} (was {_kind(first[n])}, is {_kind(now[n])})" for n in now if n in first and first[n] != now[n]]
    if changed:
        parts.append(f"changed: {_some(changed)}")
    return "; ".join(parts) or None


def _kind(entry: tuple[str, tuple[int, ...]]) -> str:
    return f"{entry[0]}{list(entry[1])}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def cut(layout: Layout, bucket_bytes: int) -> tuple[list[Slice], list[int]]:
    """Lay the tensors, in order, into buckets of at most ``bucket_bytes``; a larger tensor gets one of its own.

    No bucket is empty: tensors without bytes go into the bucket that is open.
    """
    slices: list[Slice] = []
    sizes = [0]
    for name, (dtype, shape) in layout.items():
        nbytes = mf.DTYPES[dtype][0]
        for n in shape:
            nbytes *= n
        if nbytes and sizes[-1] and sizes[-1] + nbytes > bucket_bytes:
            sizes.append(0)
        slices.append(Slice(name, dtype, shape, nbytes, len(sizes) - 1, sizes[-1]))
        sizes[-1] += nbytes
    if len(sizes) > mf.MAX_BUCKETS:
        raise InvalidStateDict(f"{len(sizes)} buckets are more than {mf.MAX_BUCKETS}: raise bucket_bytes")
    return slices, sizes


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
    state_dict: Mapping[str, Any],
    *,
    first: Layout | None,
    allow_layout_change: bool,
    bucket_bytes: int,
    spare: SpareBuffers,
    cuda: bool = False,
) -> tuple[Weights, Layout]:
    """Copy a state dict into buckets and name its bytes. ``cuda``: remember the publisher's current CUDA device.

    ``first`` is the layout of the first publish; LayoutChanged when it differs and ``allow_layout_change`` is false.
    """
    import torch

    started = time.monotonic()
    layout = check(state_dict)
    difference = None if first is None else layout_difference(first, layout)
    if difference is not None and not allow_layout_change:
        raise LayoutChanged(
            f"version {version}: tensors differ from the first publish, and engines cannot take that over "
            f"({difference}). Restart the engines with a model of the new layout and publish with "
            "allow_layout_change=True"
        )
    slices, sizes = cut(layout, bucket_bytes)
    buckets = spare.take(sizes)
    views = [_bytes(b) for b in buckets]
    entries: list[mf.TensorEntry] = []
    with_nan: list[str] = []
    for s in slices:
        tensor = state_dict[s.name].detach()
        _copy(tensor, buckets[s.bucket], s)
        if _has_nan(tensor):
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
    weights = Weights(
        version=version,
        manifest=made,
        buckets=buckets,
        nan_tensors=tuple(with_nan),
        layout_changed=difference is not None,
        build_ms=int((time.monotonic() - started) * 1000),
        cuda_device=torch.cuda.current_device() if cuda and torch.cuda.is_available() else None,
    )
    return weights, layout


def _bytes(bucket: torch.Tensor) -> memoryview:
    flat: Any = bucket.numpy()
    return memoryview(flat)


def _copy(tensor: torch.Tensor, bucket: torch.Tensor, s: Slice) -> None:
    import torch

    if not s.nbytes:
        return
    target = bucket[s.offset : s.offset + s.nbytes]
    if s.offset % tensor.element_size() == 0:
        # One copy, whatever strides and device the source has.
        target.view(tensor.dtype).view(s.shape).copy_(tensor)
    else:
        # Data regions have no padding, so a tensor may lie where its dtype could not be addressed.
        flat = tensor.resolve_neg().to("cpu").contiguous().reshape(-1)
        target.copy_(flat.view(torch.uint8))


def _has_nan(tensor: torch.Tensor) -> bool:
    import torch

    if not tensor.is_floating_point():
        return False
    return any(bool(torch.isnan(part.float() if part.element_size() == 1 else part).any()) for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() <= _NAN_ELEMENTS:
        yield tensor
    else:
        flat = tensor.reshape(-1)
        yield from (flat[at : at + _NAN_ELEMENTS] for at in range(0, flat.numel(), _NAN_ELEMENTS))
