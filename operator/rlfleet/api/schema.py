"""Turns a model's JSON schema into the structural schema that a CustomResourceDefinition takes.

Invariant: what comes out has no reference, no null, no union, a description on every field and a bound on every
string, number, list and map; otherwise ``UnboundedField`` or ``UndescribedField`` is raised, so a model that the
apiserver would refuse (or that would let a status outgrow etcd) cannot be generated at all.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_KEPT = (
    "description",
    "type",
    "format",
    "default",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)
_INT32 = 2**31 - 1


class UnboundedField(Exception):
    """A field has no limit of length, size or count."""


class UndescribedField(Exception):
    """A field does not say what it means."""


def structural_schema(model: type[BaseModel], *, defaults: bool) -> dict[str, Any]:
    """The structural schema of one model.

    ``defaults``: whether the server shall fill in missing values. True for spec; False for status, where a default
    would turn "not known yet" into a value.
    """
    raw = model.model_json_schema(by_alias=True)
    return _Converter(raw.get("$defs", {}), defaults).convert(raw, model.__name__)


def _written_default(value: Any) -> Any:
    """What to write as default: without parts that are empty or unset, None when nothing is left.

    Objects are spelled out: the server runs an object's rules on its default before it fills in the fields' own.
    """
    if isinstance(value, dict):
        parts = {key: _written_default(each) for key, each in value.items()}
        value = {key: each for key, each in parts.items() if each is not None}
    return None if value in ({}, []) else value


class _Converter:
    def __init__(self, definitions: dict[str, Any], defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def convert(self, raw: dict[str, Any], path: str) -> dict[str, Any]:
        raw = self._flatten(raw)
        extensions = {key: raw[key] for key in sorted(raw) if key.startswith("x-kubernetes-")}
        if extensions.get("x-kubernetes-int-or-string"):
            raw.pop("type", None)
        kept = {key: raw[key] for key in _KEPT if key in raw}
        if "const" in raw:
            kept["enum"] = [raw["const"]]
        if not kept.get("description"):
            raise UndescribedField(path)
        kind = kept.get("type")
        if kind == "object":
            if raw.get("properties"):
                kept["properties"] = {
                    name: self.convert(each, f"{path}.{name}") for name, each in raw["properties"].items()
                }
            elif isinstance(raw.get("additionalProperties"), dict):
                # What limits a key is said of the whole map: structural schemas know no propertyNames.
                values = {"description": "Value of one entry."} | raw["additionalProperties"]
                kept["additionalProperties"] = self.convert(values, f"{path}.*")
        elif kind == "array":
            items = raw["items"]
            kept["items"] = self.convert({"description": f"One entry. {self._describe(items)}".strip()} | items, path)
        default = _written_default(kept.pop("default", None))
        if self._defaults and default is not None:
            kept["default"] = default
        self._check_bounds(kept, extensions, path)
        return kept | extensions

    def _describe(self, raw: dict[str, Any]) -> str:
        return str(self._flatten(raw).get("description", ""))

    def _flatten(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Resolve a reference and drop null from a union; what stands beside them wins (its own description)."""
        raw = dict(raw)
        if "anyOf" in raw:
            options = [option for option in raw.pop("anyOf") if option.get("type") != "null"]
            if len(options) == 1:
                raw = self._flatten(options[0]) | raw
            elif not raw.get("x-kubernetes-int-or-string"):
                # A union of two types is only legal as int-or-string, whose extensions may stand in an option.
                raise ValueError(f"union of {options} cannot be a structural schema")
        if "$ref" in raw:
            target = self._definitions[raw.pop("$ref").rsplit("/", 1)[1]]
            raw = self._flatten(target) | raw
        return raw

    def _check_bounds(self, kept: dict[str, Any], extensions: dict[str, Any], path: str) -> None:
        kind = kept.get("type")
        unbounded = (
            (kind == "string" and not {"maxLength", "enum"} & kept.keys())
            or (kind == "integer" and not {"minimum", "maximum"} <= kept.keys())
            or (kind == "array" and "maxItems" not in kept)
            or ("additionalProperties" in kept and "maxProperties" not in kept)
            or (kind is None and not extensions.get("x-kubernetes-int-or-string"))
            or (
                kind == "object"
                and not {"properties", "additionalProperties"} & kept.keys()
                and not extensions.get("x-kubernetes-preserve-unknown-fields")
            )
        )
        if unbounded:
            raise UnboundedField(path)
        if kind == "integer":
            kept["format"] = "int32" if kept["maximum"] <= _INT32 else "int64"
