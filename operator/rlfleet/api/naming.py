"""Names of the objects that we create, derived from identity and nothing else.

Invariant: the same inputs give the same name, so a create whose answer was lost finds its own object again instead
of making a second one. Every name is a DNS-1123 label (at most 63 characters): pod names become host names, and
names are also used as label values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

MAX_NAME = 63
#: Longest EnginePool name: a pod name appends "-<index up to 4 digits>-<5 hex digits>".
MAX_POOL_NAME = MAX_NAME - len("-1023-00000")

_NOT_LABEL = re.compile(r"[^a-z0-9-]+")


def _digest(*parts: str) -> str:
    # A separator that no part may contain, or ("ab", "c") and ("a", "bc") would share a name.
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _label(prefix: str, suffix: str) -> str:
    """Cut ``prefix`` so that prefix + suffix is a DNS-1123 label."""
    head = _NOT_LABEL.sub("-", prefix.lower())[: MAX_NAME - len(suffix)].strip("-")
    return head + suffix if head else "x" + suffix


def round_name(pipeline_name: str, pipeline_uid: str, sender_incarnation: str, version: int, attempt: int) -> str:
    """Name of a SyncRound: ``<pipeline>-v<version>-<10 hex digits>``; the base version -1 reads ``vbase``.

    The digits hash (pipeline UID, sender incarnation, version, attempt): the words before them are for people.
    """
    digits = _digest(pipeline_uid, sender_incarnation, str(version), str(attempt))[:10]
    word = "base" if version < 0 else str(version)
    return _label(pipeline_name, f"-v{word}-{digits}")


def catch_up_name(
    pipeline_name: str,
    pipeline_uid: str,
    manifest_digest: str,
    incarnations: Iterable[str],
    version: int,
    attempt: int,
) -> str:
    """Name of a CatchUp: ``<pipeline>-c<version>-<10 hex digits>``; the base version -1 reads ``cbase``.

    The digits hash (pipeline UID, kind, digest, incarnations of the members, attempt), so a lost create answer finds
    its own round again.
    """
    members = ",".join(sorted(incarnations))
    digits = _digest(pipeline_uid, "CatchUp", manifest_digest, members, str(attempt))[:10]
    word = "base" if version < 0 else str(version)
    return _label(pipeline_name, f"-c{word}-{digits}")


def pod_name(pool: str, index: int, salt: str) -> str:
    """Name of an engine pod: ``<pool>-<index>-<5 hex digits>``.

    ``salt`` tells one life of this index from the next (pool UID and replacement counter). Five digits can collide:
    a caller that gets AlreadyExists for a pod that is not its own must raise the counter.
    """
    return _label(pool, f"-{index}-{_digest(pool, str(index), salt)[:5]}")


def gate_server_name(namespace: str) -> str:
    """The DNS name in the certificate of a namespace's gates. Nobody resolves it: gates have pod addresses."""
    return f"gate.{namespace}.rlfleet.internal"


def sender_server_name(namespace: str) -> str:
    """The DNS name in the certificate of a namespace's weight senders."""
    return f"sender.{namespace}.rlfleet.internal"


def engine_name(pool: str, index: int) -> str:
    """Name of an engine within its pipeline: ``<pool>-<index>``; it outlives the pods that play it."""
    return f"{pool}-{index}"
