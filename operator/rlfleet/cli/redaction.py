"""What a support bundle leaves out of what it takes along.

Invariant: a value that could be a secret is replaced, although it may be none: environment values, arguments after a
flag with a telling name, and anything that looks like a credential, wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "[redacted]"
#: Names whose values are credentials, as flags, environment variables or fields.
_TELLING = (
    r"(?:api[-_]?keys?|(?:access|secret|private|admin|auth|hf|wandb)[-_]?(?:api[-_]?)?(?:keys?|tokens?)|tokens?|secrets?"
    r"|passw(?:or)?ds?|passphrase|credentials?|authorization|cookie)"
)
_NAME = re.compile(rf"(?i)(?:^|[-_./]){_TELLING}$|(?i:apikey|token|accesskey|secretkey|password)$")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"(?i)(--[a-z0-9_-]*{_TELLING}\s+\\?[\"']?)(?!--)[^\s\"'\\,;&]+"), rf"\1{GONE}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), GONE),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {GONE}"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"), GONE),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA)[A-Za-z0-9_-]{8,}"), GONE),
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/\s:@\"']*(?::[^/\s@\"']*)?@"), rf"\1{GONE}@"),
    (re.compile(rf"(?i)((?:--?|\b)[a-z0-9_.-]*{_TELLING}\\?[\"']?\s*[=:]\s*\\?[\"']?)[^\s\"'\\,;&]+"), rf"\1{GONE}"),
)  # fmt: skip
#: Fields that are only noise, or hold an object a second time as it was applied.
_DROPPED = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
#: Environment variables of ours that are no secrets and that support needs.
_PLAIN = frozenset(
    {
        "RLFLEET_CHECKPOINT_DIR", "RLFLEET_DEVICES", "RLFLEET_ENGINE_ALLOW_UNKNOWN_VERSION", "RLFLEET_ENGINE_INDEX",
        "RLFLEET_ENGINE_NAME",
        "RLFLEET_ENGINE_TYPE", "RLFLEET_ENGINE_URL", "RLFLEET_GATE_PORT", "RLFLEET_MEMORY_LIMIT_BYTES", "RLFLEET_MODEL",
        "RLFLEET_PIPELINE", "RLFLEET_POOL", "RLFLEET_PUBLIC_KEYS", "RLFLEET_READY_WHEN_PROVEN",
        "RLFLEET_ROUTER_KEYS_DIR",
        "RLFLEET_ROUTER_QUIET_SECONDS", "RLFLEET_STAGING_DIR", "RLFLEET_STAGING_LIMIT_BYTES", "RLFLEET_STATE_DIR",
        "RLFLEET_TLS_DIR",
    }
)  # fmt: skip


def text(value: str) -> str:
    """A text without what looks like a credential."""
    for pattern, instead in _PATTERNS:
        value = pattern.sub(instead, value)
    return value


def redacted(value: Any) -> Any:
    """An object without secrets and noise; what it is made of stays as it was."""
    if isinstance(value, Mapping):
        kept = {k: _field(str(k), v) for k, v in value.items() if k not in _DROPPED}
        # A header of a probe, for instance: what the value is stands beside it.
        if isinstance(kept.get("value"), str) and _NAME.search(str(kept.get("name"))):
            kept["value"] = GONE
        return kept
    if isinstance(value, list | tuple):
        return [redacted(v) for v in value]
    return text(value) if isinstance(value, str) else value


def _field(name: str, value: Any) -> Any:
    if name == "env" and isinstance(value, list):
        return [_environment(e) for e in value]
    if name in ("args", "command") and isinstance(value, list):
        return _arguments(value)
    if isinstance(value, str) and _NAME.search(name):
        return GONE
    return redacted(value)


def _environment(entry: Any) -> Any:
    """References to Secrets tell no value and stay; plain values go, but for some of ours."""
    if not isinstance(entry, Mapping) or "value" not in entry:
        return redacted(entry)
    kept = str(entry.get("name")) in _PLAIN
    return {**redacted(entry), "value": text(str(entry["value"])) if kept else GONE}


def _arguments(words: list[Any]) -> list[Any]:
    """A value goes by its flag's name: ``--api-key=x`` and ``--api-key x``."""
    found: list[Any] = []
    after = False
    for word in words:
        if not isinstance(word, str):
            found.append(redacted(word))
            after = False
            continue
        flag, equals, _ = word.partition("=")
        telling = bool(flag.startswith("-") and _NAME.search(flag.lstrip("-")))
        if after and not word.startswith("--"):
            found.append(GONE)
        elif telling and equals:
            found.append(f"{flag}={GONE}")
        else:
            found.append(text(word))
        after = telling and not equals
    return found
