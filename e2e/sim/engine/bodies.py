"""Request bodies of the control surface, with the real engine's defaults, and how wrong ones are refused.

Invariant: a body is required even where every field has a default, unknown fields are ignored, and every refusal is
a 400 of one form (not 422).
"""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

B = TypeVar("B")


class BodyError(Exception):
    """The body is missing or a field has the wrong type; answered as 400."""


@dataclass(frozen=True)
class InitGroup:
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass(frozen=True)
class DestroyGroup:
    group_name: str = "weight_update_group"


@dataclass(frozen=True)
class BeginUpdate:
    selector: str = "all"


@dataclass(frozen=True)
class EndUpdate:
    pass


@dataclass(frozen=True)
class FromDistributed:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


@dataclass(frozen=True)
class FromDisk:
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


@dataclass(frozen=True)
class WeightVersion:
    new_version: str
    abort_all_requests: bool = True


@dataclass(frozen=True)
class WeightsByName:
    name: str
    truncate_size: int = 100


@dataclass(frozen=True)
class CheckWeights:
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None


@dataclass(frozen=True)
class Pause:
    mode: str = "abort"


@dataclass(frozen=True)
class Continue:
    pass


@dataclass(frozen=True)
class Abort:
    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True)
class MemoryTags:
    tags: list[str] | None = None


@dataclass(frozen=True)
class Generate:
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = False
    rid: str | None = None
    stream: bool | None = False


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def parse(kind: type[B], raw: Any) -> B:
    """Make a body of ``kind`` from decoded JSON. BodyError that names the field."""
    if not isinstance(raw, dict):
        raise BodyError("1 validation error: body: Input should be a valid dictionary")
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in raw:
            if field.default is MISSING:
                raise BodyError(f"1 validation error: body.{field.name}: Field required")
            continue
        if not _fits(raw[field.name], hints[field.name]):
            raise BodyError(f"1 validation error: body.{field.name}: Input should be a valid {field.type}")
        values[field.name] = raw[field.name]
    return kind(**values)
