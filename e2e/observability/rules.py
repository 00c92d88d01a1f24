"""The chart's alerts, as they are or made to fire within a test's time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[2] / "charts/rlfleet/files/alerts.yaml"
#: What only makes an alert wait: ages, windows and numbers of repetitions. What it looks at stays as it is.
_SOONER = (
    (re.compile(r"\[(5|10)m\]"), "[15s]"),
    (re.compile(r"\[(15m|30m|1h)\]"), "[60s]"),
    (re.compile(r"> (30|240)(?!\d)"), "> 1"),
    (re.compile(r"> 300(?!\d)"), "> -3600"),
    (re.compile(r"> (3|5)$"), "> 1"),
)


def alerts() -> dict[str, Any]:
    """The rules as they are shipped."""
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def eager() -> dict[str, Any]:
    """The rules without their patience."""
    rules = alerts()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule.pop("for", None)
        for pattern, sooner in _SOONER:
            rule["expr"] = pattern.sub(sooner, rule["expr"].strip())
    return rules
