"""What a state dict consists of, what of it can be carried, and where each tensor lies in the buckets.

Invariants:
- what cannot be carried is refused before a byte is copied, naming the tensor and what to publish instead;
- every rank that sees the same layout cuts the same buckets in the same order;
- within a bucket each tensor starts at a multiple of its element size. Engines view a received bucket in place, and
  refuse a tensor that lies where its dtype can not be addressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlfleet.api import manifest as mf
from rlfleet.sender.errors import InvalidStateDict

if TYPE_CHECKING:
    import torch

NAMED = 8
"""How many tensors a message names at most."""

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


def check(state_dict: Mapping[str, Any], *, sharded: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and (global) shape of every tensor, in order; InvalidStateDict names the first that can not travel.

    ``sharded``: DTensors are taken, for a publisher that gathers them.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidStateDict(f"a state dict (name -> tensor) is needed, not {type(state_dict).__name__}")
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    total = 0
    for name, tensor in state_dict.items():
        layout[name] = _entry(name, tensor, sharded)
        total += tensor.numel()
    if not total:
        raise InvalidStateDict("the state dict is empty: it holds no bytes that an engine could take over")
    if len(layout) > mf.MAX_TENSORS:
        raise InvalidStateDict(f"{len(layout)} tensors are more than the {mf.MAX_TENSORS} that a manifest can name")
    return layout


def _entry(name: Any, tensor: Any, sharded: bool) -> tuple[str, tuple[int, ...]]:
    import torch

    if not isinstance(name, str) or not 1 <= len(name) <= 512:
        raise InvalidStateDict(f"tensor name {str(name)[:80]!r}: names are strings of 1 to 512 characters")
    if not isinstance(tensor, torch.Tensor):
        raise InvalidStateDict(f"{name!r} is no tensor but {type(tensor).__name__}: leave it out of the state dict")
    if hasattr(tensor, "full_tensor"):
        if not sharded:
            raise InvalidStateDict(
                f"tensor {name!r} is sharded (DTensor): publish it with rlfleet.sender.publish_sharded on every rank"
            )
    elif hasattr(tensor, "__tensor_flatten__"):
        raise InvalidStateDict(
            f"tensor {name!r} is a {type(tensor).__name__}, which keeps its bytes in other tensors: publish those, or "
            "what it stands for as a plain tensor"
        )
    if tensor.layout is not torch.strided:
        raise InvalidStateDict(
            f"tensor {name!r}: only dense tensors can be carried, not {tensor.layout}; use to_dense()"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in mf.DTYPES:
        raise InvalidStateDict(
            f"tensor {name!r}: dtype {dtype} cannot be carried (can be: {', '.join(mf.DTYPES)}); "
            + _remedy(tensor.dtype)
        )
    if tensor.is_meta:
        raise InvalidStateDict(f"tensor {name!r} is on the meta device: it has no bytes")
    if tensor.dim() > 16:
        raise InvalidStateDict(f"tensor {name!r} has {tensor.dim()} dimensions, at most 16 can be carried")
    return dtype, tuple(tensor.shape)


def _remedy(dtype: torch.dtype) -> str:
    """What to publish in place of a tensor of a dtype for which the file format has no name."""
    import torch

    name = str(dtype).removeprefix("torch.")
    if name.startswith(("qint", "quint")):
        return "publish its int_repr(), scales and zero points, or dequantize()"
    if dtype in (torch.complex32, torch.complex128):
        return "publish torch.view_as_real(tensor)"
    if dtype.itemsize == 1 and not name.startswith(("int", "uint")):
        return "publish tensor.view(torch.uint8)"
    return "convert it to one of these"


def difference(first: Layout, now: Layout) -> str | None:
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
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def cut(layout: Layout, bucket_bytes: int) -> tuple[list[Slice], list[int]]:
    """Lay the tensors into buckets of at most ``bucket_bytes``; a larger tensor gets one of its own.

    Buckets are filled in the order of the layout; inside one, wider elements come first. No bucket is empty: tensors
    without bytes go into the bucket that is open.
    """
    buckets: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    sizes = [0]
    for name, (dtype, shape) in layout.items():
        nbytes = mf.DTYPES[dtype][0]
        for n in shape:
            nbytes *= n
        if nbytes and sizes[-1] and sizes[-1] + nbytes > bucket_bytes:
            sizes.append(0)
            buckets.append([])
        buckets[-1].append((name, dtype, shape, nbytes))
        sizes[-1] += nbytes
    if len(sizes) > mf.MAX_BUCKETS:
        raise InvalidStateDict(f"{len(sizes)} buckets are more than {mf.MAX_BUCKETS}: raise bucket_bytes")
    slices: list[Slice] = []
    for index, tensors in enumerate(buckets):
        offset = 0
        for name, dtype, shape, nbytes in sorted(tensors, key=lambda t: -mf.DTYPES[t[1]][0]):
            slices.append(Slice(name, dtype, shape, nbytes, index, offset))
            offset += nbytes
    return slices, sizes
