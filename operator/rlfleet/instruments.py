"""Prometheus instruments of one process, made from the table in api/metrics.py.

Invariant: what is not in the table cannot be exported, and what is in it is registered whether or not it was ever used,
so a scrape shows the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rlfleet.api.metrics import Metric, Type


class Instruments:
    """All instruments of a table, in a registry of their own so that several can live in one process."""

    def __init__(self, table: Sequence[Metric]) -> None:
        self.registry = CollectorRegistry()
        self._made = {m.name: _make(m, self.registry) for m in table}
        for metric in table:
            made = self._made[metric.name]
            # An alert on an increase needs the zero before it.
            if (
                isinstance(made, Counter)
                and len(metric.labels) == 1
                and 0 < len(values := metric.labels[0].values) < 50
            ):
                for value in values:
                    made.labels(value)

    def counter(self, name: str) -> Counter:
        """The counter of this name (with ``_total``)."""
        made = self._made[name]
        assert isinstance(made, Counter)
        return made

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name."""
        made = self._made[name]
        assert isinstance(made, Gauge)
        return made

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name."""
        made = self._made[name]
        assert isinstance(made, Histogram)
        return made

    def render(self) -> bytes:
        """The text for /metrics."""
        return generate_latest(self.registry)


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = [label.name for label in metric.labels]
    match metric.type:
        case Type.COUNTER:
            return Counter(metric.name.removesuffix("_total"), metric.help, labels, registry=registry)
        case Type.GAUGE:
            return Gauge(metric.name, metric.help, labels, registry=registry)
        case Type.HISTOGRAM:
            return Histogram(metric.name, metric.help, labels, buckets=metric.buckets, registry=registry)


Labels = tuple[str, ...]


class OwnedSeries:
    """Series that belong to objects: what an object no longer has, and what a gone object had, is removed."""

    def __init__(self) -> None:
        self._owned: dict[Labels, set[tuple[Counter | Gauge, Labels]]] = {}

    def count(self, owner: Labels, counter: Counter, labels: Labels, amount: float = 1) -> None:
        """Add to a counter that goes with ``owner``."""
        counter.labels(*labels).inc(amount)
        self._owned.setdefault(owner, set()).add((counter, labels))

    def replace(self, owner: Labels, wanted: Mapping[tuple[Gauge, Labels], float]) -> None:
        """These are all series of ``owner`` now; none: it is gone."""
        for (gauge, labels), value in wanted.items():
            gauge.labels(*labels).set(value)
        for made, labels in self._owned.get(owner, set()) - set(wanted):
            made.remove(*labels)
        if wanted:
            self._owned[owner] = set(wanted)
        else:
            self._owned.pop(owner, None)


def set_or_remove(gauge: Gauge, labels: Labels, value: float | None) -> None:
    """Set one series; None removes it, whether it was there or not."""
    if value is not None:
        gauge.labels(*labels).set(value)
        return
    try:
        gauge.remove(*labels)
    except KeyError:
        pass  # whose series never was
