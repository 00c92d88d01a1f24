"""SyncRound: one weight sync as a durable, owned object.

Invariant that the schema itself keeps: the order does not change once given (only cancel can be set, and not taken
back). What the status keeps stands in ``syncround_status``.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from rlfleet.api.v1alpha1.common import (
    MAX_LISTED_ENGINES,
    UNIQUE,
    KubernetesObject,
    ManifestDigest,
    ObjectName,
    Spec,
    Uid,
    WeightVersion,
    immutable,
    rule,
    rules,
)
from rlfleet.api.v1alpha1.syncround_status import SyncRoundStatus

NEW_ROUND = "create another SyncRound"


def _keeps(field: str) -> dict[str, str]:
    # For optional fields a rule on the field itself would miss that it appears or disappears.
    return rule(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} is immutable: {NEW_ROUND}",
        at=f".{field}",
    )


class RoundKind(StrEnum):
    """What a round is for."""

    REFRESH = "Refresh"
    CATCH_UP = "CatchUp"


class SyncRoundSpec(Spec):
    """What a round is to do. Immutable but for cancel."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!self.allowRollback || has(self.expectedCommitted)",
                "allowRollback needs expectedCommitted: the version that you know to be committed",
                at=".expectedCommitted",
                reason="FieldValueRequired",
            ),
            rule(
                "self.allowRollback || !has(self.expectedCommitted)",
                "expectedCommitted is for allowRollback only",
                at=".expectedCommitted",
                reason="FieldValueForbidden",
            ),
            rule(
                "self.kind != 'CatchUp' || has(self.engines)",
                "kind CatchUp needs engines: the names of the pods to bring to the committed version",
                at=".engines",
                reason="FieldValueRequired",
            ),
            rule(
                "self.kind == 'CatchUp' || !has(self.engines)",
                "engines are for kind CatchUp only: a Refresh always takes the whole pipeline",
                at=".engines",
                reason="FieldValueForbidden",
            ),
            rule(
                "self.kind != 'CatchUp' || has(self.manifestDigest)",
                "kind CatchUp needs manifestDigest: the digest of the committed version",
                at=".manifestDigest",
                reason="FieldValueRequired",
            ),
            rule(
                "self.kind != 'CatchUp' || !self.allowRollback",
                "kind CatchUp commits nothing, so there is nothing to roll back",
                at=".allowRollback",
                reason="FieldValueForbidden",
            ),
            _keeps("manifestDigest"),
            _keeps("expectedCommitted"),
            _keeps("engines"),
        )
    )

    pipeline: ObjectName = Field(
        description="Name of the RLPipeline, in the same namespace, whose engines take over the version.",
        json_schema_extra=immutable("pipeline", NEW_ROUND),
    )
    version: WeightVersion = Field(
        description="Policy version to take over; -1 is the base that the sender holds at start.",
        json_schema_extra=immutable("version", NEW_ROUND),
    )
    kind: RoundKind = Field(
        default=RoundKind.REFRESH,
        description="Refresh: all engines of the pipeline take over the version. CatchUp: the named engines are "
        "brought to the committed version; it commits nothing. The operator opens CatchUps by itself.",
        json_schema_extra=immutable("kind", NEW_ROUND),
    )
    engines: tuple[ObjectName, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_LISTED_ENGINES,
        description="CatchUp only: names of the engine pods. Those that need nothing when the round starts are left "
        "alone.",
        json_schema_extra=UNIQUE,
    )
    sender_incarnation: Uid = Field(
        description="Sender process that publishes the version (RLPipeline.status.sender.incarnation). Once that "
        "process is gone the round is Superseded: a restarted trainer may publish other bytes under the same version. "
        "With RLPipeline.spec.weights.checkpoint: checkpoint.",
        json_schema_extra=immutable("senderIncarnation", NEW_ROUND),
    )
    attempt: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Counts tries at one version; raised only after the try before ended without success.",
        json_schema_extra=immutable("attempt", NEW_ROUND),
    )
    manifest_digest: ManifestDigest | None = Field(
        default=None,
        description="Digest that the version must have at the sender; absent: whichever it has. "
        "A round for other bytes fails. Required for CatchUp: the committed one.",
    )
    allow_rollback: bool = Field(
        default=False,
        description="Allow a version below the committed one.",
        json_schema_extra=immutable("allowRollback", NEW_ROUND),
    )
    expected_committed: WeightVersion | None = Field(
        default=None,
        description="With allowRollback: the version that must be committed when the round starts, else it fails.",
    )
    cancel: bool = Field(
        default=False,
        description="Stop the round. Acts until engines begin to load; later the round settles by what engines hold.",
        json_schema_extra=rules(rule("self || !oldSelf", "cancel cannot be undone: create another SyncRound")),
    )


class SyncRound(KubernetesObject):
    """One weight sync: the engines of a pipeline take over one version, or the round says why not."""

    spec: SyncRoundSpec
    status: SyncRoundStatus = SyncRoundStatus()
