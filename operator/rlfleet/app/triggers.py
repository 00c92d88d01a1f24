"""From events to queue keys: which root object has to look again.

Invariant: an event's content only says whom to wake, never what to do; a key too many costs a reconcile, a key too
few is caught by the next poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfleet.api import labels
from rlfleet.control.context import Enqueue, Kind, Priority, QueueKey
from rlfleet.kube.reflector import Change
from rlfleet.plan.deletion import FINALIZERS, holds_up

Selector = Mapping[str, str]


class Triggers:
    """Keeps who watches whom: pools of a pipeline, pods that a pool adopts, pods of its routers and of a sender."""

    def __init__(self, enqueue: Enqueue) -> None:
        self._enqueue = enqueue
        self._pipeline_of: dict[tuple[str, str], str] = {}
        self._selectors: dict[QueueKey, list[Selector]] = {}
        self._adopts: dict[QueueKey, Selector] = {}

    def pool(self, namespace: str, name: str, spec: Mapping[str, Any] | None) -> None:
        """An EnginePool appeared or changed; ``spec`` None: it is gone."""
        key = QueueKey(Kind.POOL, namespace, name)
        pipeline = str((spec or {}).get("pipeline") or "") or self._pipeline_of.get((namespace, name), "")
        if spec is None:
            self._pipeline_of.pop((namespace, name), None)
            self._selectors.pop(key, None)
            self._adopts.pop(key, None)
        else:
            source = spec.get("source") or {}
            adopt = (source.get("adopt") or source.get("dynamo") or {}).get("selector") or {}
            if adopt.get("matchLabels"):
                self._adopts[key] = adopt["matchLabels"]
            self._pipeline_of[(namespace, name)] = pipeline
            self._selectors[key] = [
                match for r in spec.get("routers") or [] if (match := (r.get("podSelector") or {}).get("matchLabels"))
            ]
        self._enqueue(key, priority=Priority.SCALE)
        if pipeline:
            self._enqueue(QueueKey(Kind.PIPELINE, namespace, pipeline), priority=Priority.ROUND)

    def pipeline(self, namespace: str, name: str, spec: Mapping[str, Any] | None) -> None:
        """An RLPipeline appeared or changed; ``spec`` None: it is gone."""
        key = QueueKey(Kind.PIPELINE, namespace, name)
        if spec is None:
            self._selectors.pop(key, None)
        else:
            sender = ((spec.get("weights") or {}).get("sender") or {}).get("podSelector") or {}
            self._selectors[key] = [sender["matchLabels"]] if sender.get("matchLabels") else []
        self._enqueue(key, priority=Priority.ROUND)
        for (of, pool), pipeline in self._pipeline_of.items():
            if of == namespace and pipeline == name:
                self._enqueue(QueueKey(Kind.POOL, namespace, pool), priority=Priority.SCALE)

    def round(self, namespace: str, spec: Mapping[str, Any] | None) -> None:
        """A SyncRound appeared, changed or is gone."""
        pipeline = str((spec or {}).get("pipeline") or "")
        if pipeline:
            self._enqueue(QueueKey(Kind.PIPELINE, namespace, pipeline), priority=Priority.ROUND)

    def demand(self, namespace: str, name: str) -> None:
        """A TrainerDemand appeared, changed or is gone; it has its pipeline's name."""
        self._enqueue(QueueKey(Kind.PIPELINE, namespace, name), priority=Priority.ROUND)

    def deletion(self, plural: str, namespace: str, name: str, meta: Mapping[str, Any]) -> None:
        """An object of ours appeared or changed: while our finalizer holds its deletion up, its ceiling is watched."""
        if holds_up({"metadata": meta}, FINALIZERS[plural]):
            self._enqueue(QueueKey(Kind.DELETION, namespace, f"{plural}/{name}"), priority=Priority.DELETE)

    def pod(self, change: Change) -> None:
        """A pod changed in the view."""
        namespace = change.key[0]
        for marks in (change.labels, change.old_labels):
            if labels.POOL in marks:
                self._enqueue(QueueKey(Kind.POOL, namespace, marks[labels.POOL]), priority=Priority.SCALE)
            if labels.PIPELINE in marks:
                self._enqueue(QueueKey(Kind.PIPELINE, namespace, marks[labels.PIPELINE]), priority=Priority.ROUND)
        if labels.POOL in change.labels or labels.POOL in change.old_labels:
            return
        for key, match in self._adopts.items():
            if key.namespace == namespace and any(
                match.items() <= marks.items() for marks in (change.labels, change.old_labels)
            ):
                self._enqueue(key, priority=Priority.SCALE)
                pipeline = self._pipeline_of.get((namespace, key.name))
                if pipeline:
                    self._enqueue(QueueKey(Kind.PIPELINE, namespace, pipeline), priority=Priority.ROUND)
        for key, selectors in self._selectors.items():
            if key.namespace == namespace and any(
                match.items() <= marks.items() for match in selectors for marks in (change.labels, change.old_labels)
            ):
                self._enqueue(key, priority=Priority.SCALE)
