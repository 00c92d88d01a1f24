"""Whether the apiserver's schemas of our kinds take all that this version writes and reads. Pure.

Invariant: what a schema of the cluster would silently drop, or refuse, of the fields of this version is named. A schema
that takes more than ours (a newer one) is none of our business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rlfleet.api import labels
from rlfleet.api.crdgen import KINDS, schema

Schema = Mapping[str, Any]
#: Limits that must not be lower in the cluster than here, and those that must not be higher.
_UPPER = ("maxLength", "maxItems", "maxProperties", "maximum")
_LOWER = ("minLength", "minItems", "minProperties", "minimum")
_OPEN = "x-kubernetes-preserve-unknown-fields"


def kinds(openapi: Schema) -> dict[str, Schema]:
    """Kind -> schema, out of an OpenAPI v3 document of our group and version."""
    found: dict[str, Schema] = {}
    for each in (openapi.get("components") or {}).get("schemas", {}).values():
        for named in each.get("x-kubernetes-group-version-kind") or []:
            if (named.get("group"), named.get("version")) == (labels.GROUP, labels.VERSION):
                found[str(named["kind"])] = each
    return found


@cache
def needed() -> dict[str, Schema]:
    """Kind -> schema of this version. Made once: it takes a third of a second, in which nothing else runs."""
    return {kind.name: schema(kind) for kind in KINDS}


def lacking(found: Mapping[str, Schema]) -> list[str]:
    """What the cluster's schemas lack, most important first: whole kinds, then fields and their limits."""
    missing = [f"{kind.name} is not served" for kind in KINDS if kind.name not in found]
    for kind in KINDS:
        if kind.name in found:
            ours, theirs = needed()[kind.name]["properties"], found[kind.name].get("properties") or {}
            for part in ("spec", "status"):
                if part in ours:
                    missing += _compare(f"{kind.name}.{part}", ours[part], theirs.get(part))
    return missing


def _compare(path: str, ours: Schema, theirs: Schema | None) -> Iterator[str]:
    if theirs is None:
        yield f"{path} is not known"
        return
    if theirs.get("type") not in (None, ours.get("type")):
        yield f"{path} is a {theirs['type']}, not a {ours.get('type')}"
        return
    if "enum" in theirs and (refused := [v for v in ours.get("enum") or [] if v not in theirs["enum"]]):
        yield f"{path} does not take {refused[0]!r}"
    for limits, sign in ((_UPPER, 1), (_LOWER, -1)):
        for limit in limits:
            if limit in theirs and (limit not in ours or sign * ours[limit] > sign * theirs[limit]):
                yield f"{path}: {limit} is {theirs[limit]:g}, not {ours.get(limit, 'without')}"
    if theirs.get(_OPEN):
        return
    for name, each in (ours.get("properties") or {}).items():
        yield from _compare(f"{path}.{name}", each, (theirs.get("properties") or {}).get(name))
    for inner, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(ours.get(inner), Mapping):
            yield from _compare(f"{path}{mark}", ours[inner], theirs.get(inner))
