"""What bytes a policy consists of: the manifest, and the digest that names them.

Invariant: two trainers that publish different bytes under one version number get different digests, and the
digest does not depend on how the tensors were cut into buckets. Everything that claims "this engine holds
version v" also names the digest.

A bucket's data region is the plain concatenation of its tensors' bytes, in order. That is at once the data
region of a safetensors file (https://huggingface.co/docs/safetensors: an 8-byte little-endian header length, a
JSON header, then the data without holes) and SGLang's flattened bucket ([engines] 1.1), so one buffer at the
sender serves both transports.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

#: Names of torch dtypes that we carry, with the bytes of one element and the safetensors name.
DTYPES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "uint16": (2, "U16"),
    "uint32": (4, "U32"),
    "uint64": (8, "U64"),
    "int8": (1, "I8"),
    "int16": (2, "I16"),
    "int32": (4, "I32"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "complex64": (8, "C64"),
}

MAX_TENSORS = 200_000
MAX_BUCKETS = 65_536

HashAlgorithm = Literal["xxh3-128"]
TensorName = Annotated[str, Field(min_length=1, max_length=512)]
HexHash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class TensorEntry(_Model):
    """One tensor: its name, dtype, shape, the hash of its bytes, and where it lies."""

    name: TensorName
    dtype: str = Field(description="torch dtype name without the prefix, one of DTYPES")
    shape: tuple[int, ...] = Field(max_length=16, description="sizes per dimension; () for a 0-d tensor")
    hash: HexHash = Field(description="content hash of the tensor's bytes (C order, little endian)")
    bucket: int = Field(ge=0, description="index of the bucket that carries it")
    offset: int = Field(ge=0, description="byte offset in that bucket's data region")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor: the element size times the product of the shape."""
        size = DTYPES[self.dtype][0]
        for n in self.shape:
            size *= n
        return size

    @model_validator(mode="after")
    def _known(self) -> TensorEntry:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"tensor {self.name!r}: dtype {self.dtype!r} can not be carried (known: {', '.join(DTYPES)})"
            )
        if any(n < 0 for n in self.shape):
            raise ValueError(f"tensor {self.name!r}: negative size in shape {list(self.shape)}")
        return self


class Manifest(_Model):
    """All tensors of one policy and the buckets they lie in.

    ``digest`` is recomputed and compared on construction, so a Manifest object is always self-consistent: every
    bucket is covered by its tensors without a hole or an overlap.
    """

    hash_algorithm: HashAlgorithm = "xxh3-128"
    tensors: tuple[TensorEntry, ...] = Field(min_length=1, max_length=MAX_TENSORS)
    bucket_bytes: tuple[int, ...] = Field(
        min_length=1, max_length=MAX_BUCKETS, description="bytes of each bucket's data region"
    )
    digest: Digest

    @property
    def total_bytes(self) -> int:
        """Bytes of all data regions."""
        return sum(self.bucket_bytes)

    def bucket(self, index: int) -> tuple[TensorEntry, ...]:
        """The tensors of one bucket, in the order of their bytes."""
        return tuple(t for t in self.tensors if t.bucket == index)

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        ends = [0] * len(self.bucket_bytes)
        seen: set[str] = set()
        last_bucket = 0
        for t in self.tensors:
            if t.name in seen:
                raise ValueError(f"tensor {t.name!r} appears twice")
            seen.add(t.name)
            if t.bucket >= len(ends) or t.bucket < last_bucket:
                raise ValueError(f"tensor {t.name!r}: bucket {t.bucket} is out of order or unknown")
            last_bucket = t.bucket
            if t.offset != ends[t.bucket]:
                raise ValueError(
                    f"tensor {t.name!r}: offset {t.offset} leaves a hole or overlaps (expected {ends[t.bucket]})"
                )
            ends[t.bucket] += t.nbytes
        if tuple(ends) != self.bucket_bytes:
            raise ValueError("bucketBytes do not equal the bytes of the tensors in each bucket")
        if self.digest != manifest_digest(self.hash_algorithm, self.tensors):
            raise ValueError("digest does not match the tensors")
        return self


def manifest_digest(hash_algorithm: str, tensors: tuple[TensorEntry, ...] | list[TensorEntry]) -> str:
    """The name of these bytes: SHA-256 over algorithm and the sorted (name, dtype, shape, hash) of every tensor."""
    rows = sorted([t.name, t.dtype, list(t.shape), t.hash] for t in tensors)
    body = json.dumps([hash_algorithm, rows], separators=(",", ":"), ensure_ascii=True).encode()
    return "sha256:" + hashlib.sha256(body).hexdigest()


def safetensors_header(entries: tuple[TensorEntry, ...]) -> bytes:
    """The bytes that, put before a bucket's data region, make it a safetensors file (padded to 8 bytes)."""
    header = {
        t.name: {
            "dtype": DTYPES[t.dtype][1],
            "shape": list(t.shape),
            "data_offsets": [t.offset, t.offset + t.nbytes],
        }
        for t in entries
    }
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body
