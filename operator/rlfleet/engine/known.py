"""Which versions of which engines this gate knows, and how: run for real, or only read.

Invariant: an engine of another version is refused by name unless somebody allows it (spec.engine.allowUnknownVersion),
because what a call does there, a success above all, is a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Evidence(StrEnum):
    """What the knowledge of a version rests on."""

    TESTED = "tested"
    """The project's tests drive the real engine of this version, on a CPU."""
    READ = "read"
    """Paths and fields were compared with a tested version's in the published package; nobody ran it here."""


@dataclass(frozen=True, slots=True)
class Known:
    """One version of one engine type. ``differs``: what is not as in the tested version."""

    engine: str
    version: str
    evidence: Evidence
    differs: str = ""


KNOWN: Final = (
    Known("SGLang", "0.5.23", Evidence.TESTED),
    Known("SGLang", "0.5.22", Evidence.READ),
    Known("SGLang", "0.5.21", Evidence.READ),
    Known("SGLang", "0.5.20", Evidence.READ, "broadcast updates without a session"),
    Known("VLLM", "0.32.0", Evidence.TESTED),
)

#: What follows the release proper: a build's name (+cpu), a package made anew (.post1).
_SUFFIX = re.compile(r"(\.post\d+)?(\+.*)?$")


def find(engine: str, version: str) -> Known | None:
    """What is known of this version; builds and re-packaged releases count as the release that they are of."""
    release = _SUFFIX.sub("", version)
    return next((k for k in KNOWN if (k.engine, k.version) == (engine, release)), None)


def refusal(engine: str, version: str) -> str | None:
    """Why an engine of this version is not driven, or None. A type without entries has no versions to know."""
    known = [k for k in KNOWN if k.engine == engine]
    if not known or find(engine, version) is not None:
        return None
    listed = ", ".join(f"{k.version} ({k.evidence})" for k in known)
    return (
        f"{engine} {version or 'of a version that it does not tell'} is not known, only {listed}: use one of these, or "
        "set spec.engine.allowUnknownVersion; for pods that the operator does not make, "
        "RLFLEET_ENGINE_ALLOW_UNKNOWN_VERSION=true at the container gate"
    )
