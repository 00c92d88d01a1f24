"""Checkpoints that engines load from a shared path: what lies in the directory of one version.

A directory holds safetensors files, ``manifest.json`` (a Descriptor) and, written last, the marker ``COMPLETE`` with
the manifest's digest. Bytes are named as everywhere, by (version, manifest digest): the path only says where they lie.

Invariants: a directory without its marker is not there yet; the tensors of the files are exactly those of the manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from rlfleet.api.manifest import MAX_BUCKETS, Manifest

MANIFEST_FILE = "manifest.json"
MARKER_FILE = "COMPLETE"
#: What ``spec.weights.checkpoint.pathTemplate`` must contain.
VERSION_FIELD = "{version}"
#: Stands where a round or a commit names a sender process: no process holds these bytes.
INCARNATION = "checkpoint"
#: Files that engines load when they are given a directory. One that the manifest does not name would be loaded unread.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,200}\.safetensors$")]


class Descriptor(BaseModel):
    """``manifest.json``: which bytes the directory holds, and in which file each bucket lies."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    version: int = Field(ge=-1, le=2**53)
    files: tuple[FileName, ...] = Field(
        min_length=1, max_length=MAX_BUCKETS, description="safetensors file of each bucket, in the order of the buckets"
    )
    manifest: Manifest

    @model_validator(mode="after")
    def _one_file_per_bucket(self) -> Descriptor:
        if len(self.files) != len(self.manifest.bucket_bytes) or len(set(self.files)) != len(self.files):
            raise ValueError("files must name one file per bucket, each once")
        return self


def parse(raw: bytes) -> Descriptor:
    """The descriptor of a directory; ValueError says in one line what is wrong with it."""
    try:
        return Descriptor.model_validate_json(raw)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or MANIFEST_FILE
        raise ValueError(f"{where}: {first['msg']}") from e


def directory(template: str, version: int) -> str:
    """The path of one version."""
    return template.replace(VERSION_FIELD, str(version))


def file_name(index: int, count: int) -> str:
    """Name of the file of one bucket, as engines expect names of sharded checkpoints."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
