"""Raw tensor bytes to numpy and safetensors files, without torch and without a copy of the file format's library.

Invariant: the model's own parameters become float32, whatever dtype travelled, by the same rule for both transports; so
the same published bytes give the same parameters (and checksums) whether they came from disk or by broadcast. A tensor
that is not the model's stays the bytes that travelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .model import Array

_NUMPY = {"float32": "<f4", "float16": "<f2", "float64": "<f8"}
#: safetensors name -> torch name, bytes of one element.
_SAFETENSORS = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
_SIZES = dict(_SAFETENSORS.values())


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it travelled: torch dtype name, shape, bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def element_size(dtype: str) -> int:
    """Bytes of one element of a torch dtype name. ValueError for a dtype that no engine knows."""
    if dtype not in _SIZES:
        raise ValueError(f"unsupported dtype {dtype}")
    return _SIZES[dtype]


def decode(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
    """One tensor from its bytes (C order, little endian). ValueError when the sizes do not fit together."""
    if len(data) != element_size(dtype) * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{len(data)} bytes do not make a {dtype} tensor of shape {list(shape)}")
    if dtype != "bfloat16" and dtype not in _NUMPY:
        raise ValueError(f"the model has no parameter of dtype {dtype}")
    if dtype == "bfloat16":  # the upper half of a float32
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32).reshape(shape)


def read_safetensors(path: Path) -> Iterator[tuple[str, RawTensor]]:
    """Names and tensors of one safetensors file, in the order of their bytes. ValueError for a malformed file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= path.stat().st_size - 8:
            raise ValueError(f"{path.name}: header length {size} does not fit the file")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = memoryview(file.read())
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        if entry["dtype"] not in _SAFETENSORS:
            raise ValueError(f"{path.name}: tensor {name}: unsupported dtype {entry['dtype']}")
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= len(data):
            raise ValueError(f"{path.name}: tensor {name}: offsets reach past the end of the file")
        yield name, RawTensor(_SAFETENSORS[entry["dtype"]][0], tuple(entry["shape"]), data[start:stop])


def write_safetensors(path: Path, state: Mapping[str, Array]) -> None:
    """Write float32 tensors as one safetensors file (used for checkpoints and in tests)."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in state.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    with path.open("wb") as file:
        file.write(len(body).to_bytes(8, "little") + body)
        for tensor in state.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())
