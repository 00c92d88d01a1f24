"""What the three kinds share: bases, bounded types, and the Kubernetes extensions of their schemas.

Invariants:
- every type here is bounded, because the apiserver refuses CEL rules over values without bounds and etcd refuses
  objects over 1.5 MiB;
- spec models refuse unknown fields, so that nothing a user wrote is silently ignored; status and metadata models
  drop them, so that an operator of the previous release can read what its successor wrote.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
#: Highest whole number that JSON carries exactly in every client. The apiserver also reads the limits of a schema as
#: floating point: with 2**63 - 1 as maximum it refuses every value.
MAX_EXACT = 2**53
MAX_VERSION = MAX_EXACT
#: Lists that grow with the fleet name everyone up to here and only the exceptions beyond.
MAX_LISTED_ENGINES = 64
MAX_MEMBERS = 4096


def rule(expression: str, message: str, *, at: str = "", reason: str = "FieldValueInvalid") -> dict[str, str]:
    """One CEL rule of a schema; ``at`` is the field, relative to the schema, that the server's answer names."""
    made = {"rule": expression, "message": message, "reason": reason}
    return made | {"fieldPath": at} if at else made


def rules(*each: dict[str, str]) -> dict[str, Any]:
    """The schema extension that carries CEL rules."""
    return {"x-kubernetes-validations": list(each)}


def immutable(field: str, advice: str) -> dict[str, Any]:
    """A field that keeps the value it was created with. Only for fields that are always set (required or defaulted)."""
    return rules(rule("self == oldSelf", f"{field} is immutable: {advice}"))


def keyed_by(*keys: str) -> dict[str, Any]:
    """A list whose entries are told apart, and kept unique, by these fields."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


#: A list that is written as a whole.
ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
#: A list of unique plain values.
UNIQUE: dict[str, Any] = {"x-kubernetes-list-type": "set"}
#: A map that is written as a whole.
ATOMIC_MAP: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}

#: Engines as a number, or as a percentage of those that are meant.
COUNT_OR_PERCENT: dict[str, Any] = {
    "x-kubernetes-int-or-string": True,
    "maxLength": 32,
    "minimum": 0,
    "maximum": 4096,
    # A rule instead of a pattern, whose answer would only cite a regular expression.
    **rules(
        rule(
            "type(self) == int || self.matches('^(100|[1-9]?[0-9])%$')",
            "maxUnavailable must be a number of engines, or a percentage from 0% to 100%",
        )
    ),
}

ObjectName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
NodeName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")]
DeviceId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]
Uid = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
ManifestDigest = Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
ShortText = Annotated[str, Field(max_length=256)]
Message = Annotated[str, Field(max_length=1024)]
ReasonText = Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
ReportedUrl = Annotated[str, Field(max_length=512, pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$")]
#: What a user writes. Whatever stands in it is repeated in status, Events and logs.
Url = Annotated[
    ReportedUrl,
    Field(
        json_schema_extra=rules(
            rule(
                "!self.matches('^[a-z]+://[^/]*@')",
                "the url must hold no user name or password: it is repeated in status, Events and logs; write the "
                "address alone",
            )
        )
    ),
]
Port = Annotated[int, Field(ge=1, le=65535)]
WeightVersion = Annotated[int, Field(ge=-1, le=MAX_VERSION)]
Generation = Annotated[int, Field(ge=0, le=MAX_EXACT)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
WholeNumber = Annotated[int, Field(ge=0, le=MAX_EXACT)]
Milliseconds = Annotated[int, Field(ge=0, le=MAX_VERSION)]
ByteCount = Annotated[int, Field(ge=0, le=MAX_EXACT)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
LabelKey = Annotated[str, Field(max_length=317)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]


class Spec(BaseModel):
    """Base of what users write."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Status(BaseModel):
    """Base of what the operator writes."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object to write; fields without a value are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class LabelSelector(Spec):
    """Selects pods of the same namespace by their labels."""

    match_labels: dict[LabelKey, LabelValue] = Field(
        min_length=1,
        max_length=16,
        description="Labels that a pod must carry, all of them. An empty one is refused: it would match every pod.",
        json_schema_extra=ATOMIC_MAP,
    )


class NodeDevices(Spec):
    """GPUs of one node."""

    node: NodeName = Field(description="Name of the Node.")
    devices: tuple[DeviceId, ...] = Field(
        min_length=1,
        max_length=64,
        description="UUIDs of physical GPUs as the driver reports them (GPU-...), or of MIG slices (MIG-...).",
        json_schema_extra=UNIQUE,
    )


class Condition(Status):
    """One aspect of the object's state, as metav1.Condition."""

    type: ReasonText = Field(description="What this condition is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds; Unknown when it is not known.")
    reason: ReasonText = Field(description="Why, as one stable CamelCase word; see the list of reasons.")
    message: Message = Field(description="Why, for people.")
    observed_generation: Generation = Field(
        description="The metadata.generation that this condition was computed from."
    )
    last_transition_time: Time = Field(description="When status last changed.")


ConditionList = Annotated[
    tuple[Condition, ...],
    Field(max_length=16, json_schema_extra=keyed_by("type")),
]


class OwnerReference(BaseModel):
    """The part of an owner reference that we read."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    api_version: str = ""
    kind: str
    name: str
    uid: str
    controller: bool = False


class ObjectMeta(BaseModel):
    """The part of an object's metadata that we read."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()


class InvalidObject(ValueError):
    """An object is not what its kind's schema says; the message names the object and the fields."""


class KubernetesObject(BaseModel):
    """Base of our kinds: reading from and naming in messages."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    api_version: str
    kind: str
    metadata: ObjectMeta

    @classmethod
    def from_dict(cls, obj: dict[str, Any]) -> Self:
        """Read an object as the API answers it; InvalidObject says which fields are wrong."""
        try:
            return cls.model_validate(obj)
        except ValidationError as e:
            raw_meta = obj.get("metadata") if isinstance(obj, dict) else None
            meta: dict[str, Any] = raw_meta if isinstance(raw_meta, dict) else {}
            where = f"{cls.__name__} {meta.get('namespace', '')}/{meta.get('name', '')}"
            faults = "; ".join(f"{'.'.join(map(str, err['loc']))}: {err['msg']}" for err in e.errors()[:8])
            raise InvalidObject(f"{where}: {faults}") from e
