"""Checks a PromQL expression against the metric table: names, labels, and values of labels with a closed list."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlfleet.api import metrics

#: Labels that Prometheus itself gives, and the bucket's bound.
_GIVEN = {"job", "instance", "le"}
#: Labels that the chart's PodMonitor gives to series that have none of that name: those of gates and senders.
_OF_PODS = {"namespace", "pod", "pipeline", "pool"}
_SERIES = re.compile(r"\b(rlfleet_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def problems(expression: str) -> list[str]:
    """What in an expression is not in the table; empty: nothing."""
    return list(_problems(expression))


def _problems(expression: str) -> Iterator[str]:
    known: set[str] = set(_GIVEN)
    found = False
    for name, matchers in _SERIES.findall(expression):
        found = True
        metric = metrics.find(name)
        if metric is None:
            yield f"{name} is no metric"
            continue
        labels = {label.name: label for label in metric.labels}
        given = _GIVEN | (_OF_PODS if metric not in metrics.OPERATOR else set())
        known |= set(labels) | given
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in labels and label not in given:
                yield f"{name} has no label {label}"
            elif label in labels and (values := labels[label].values) and "$" not in value:
                words = value.split("|") if "~" in operator else [value]
                yield from (f"{name}: {label} is never {w}" for w in words if w not in values)
    for grouping in _GROUPING.findall(expression):
        yield from (f"no metric of it has the label {g}" for g in re.findall(r"\w+", grouping) if g not in known)
    if not found and "process_" not in expression:
        yield "it asks for no metric of ours"
