"""The trainer's side of sharing GPUs with engines: progress, and GPUs for a train step.

Everything said here stands in the TrainerDemand of the pipeline's name, which only this trainer writes.

Invariants:
- a train step begins only with a grant of this very request: each request has an id, and the grant repeats it;
- GPUs are given back whatever happened to the step or the sync, and a request that was not granted in time is
  withdrawn: nothing is left asleep for a trainer that does not wait any more;
- what lies in the object of another trainer process (another pod UID) is dropped, never continued: for a request of
  one's own. A report leaves the other one's requests alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlfleet.api import labels
from rlfleet.api.conditions import Reason
from rlfleet.api.progress import StreamProgress, aggregate
from rlfleet.api.v1alpha1 import RLPipeline
from rlfleet.api.v1alpha1.rlpipeline_status import DemandPriority, Grant
from rlfleet.client import errors
from rlfleet.client.api import CALL_SECONDS, DEMANDS, Conflict, Exists, Invalid
from rlfleet.client.reading import Reader
from rlfleet.client.waiting import Progress, Wait, say_nothing

log = logging.getLogger(__name__)
Spec = dict[str, Any]

ACTOR = "actor-train"
#: Seconds for a write of the demand, all tries together.
WRITE_SECONDS = 60.0
#: Name of a trainer that has no pod UID.
NO_POD = "outside-the-cluster"
_NOT_SEEN = "NotSeen"


def _always(spec: Spec) -> bool:
    """A request for GPUs says that this trainer trains now."""
    return True


def _never(spec: Spec) -> bool:
    """What another trainer has there is not what this one gives back or ends."""
    return False


def _is_idle(spec: Spec) -> bool:
    """Nothing is asked for, or by a trainer without a pod's name, of which nobody could tell that it is gone.

    A pod that is told to end reports on while its successor trains: engines would wake on GPUs that are in use.
    """
    return not spec.get("requests") or not spec["trainer"].get("podName")


class Demanding(Reader):
    """The part of Client that reports and demands; see Client."""

    def _trainer(self, pod_uid: str | None, pod_name: str | None) -> None:
        """Who writes: the arguments, else what the pod's environment says."""
        self._pod_uid = pod_uid or os.environ.get("RLFLEET_POD_UID") or NO_POD
        self._pod_name = pod_name or os.environ.get("RLFLEET_POD_NAME")
        self._writing = threading.Lock()
        self._demand: dict[str, Any] | None = None
        self._owner = ""
        self._counters: dict[str, StreamProgress] = {}

    # ---------------------------------------------------------------------------------------------- progress

    def report_progress(
        self, collected: int, *, target: int, batch: int = 0, stream: str = ACTOR, force: bool = False
    ) -> bool:
        """Say how many trajectories of a batch there are; returns whether that was worth a write.

        ``collected`` and ``target`` are totals of this batch, never increments, so that a lost report does not matter.
        Written is what moves the figure over all streams by 2 %, begins another ``batch``, or is forced. Cheap to call
        for every trajectory.
        """
        mine = StreamProgress(stream, batch, target, max(0, collected))
        with self._writing:
            self._counters[stream] = mine
            known = _streams(self._demand)
            if not force and self._demand is not None and _worthless(known, {**known, **self._counters}):
                return False
        return self._write(lambda spec: _with_streams(spec, {**_streams_of(spec), **self._counters}), over=_is_idle)

    def clear_progress(self, stream: str = ACTOR) -> bool:
        """A stream is over; returns whether there was one. The progress of a pipeline without streams is absent."""

        def without(spec: Spec) -> Spec:
            return _with_streams(spec, {k: v for k, v in _streams_of(spec).items() if k != stream})

        with self._writing:
            self._counters.pop(stream, None)
        return self._write(without, over=_never)

    # ---------------------------------------------------------------------------------------------- GPUs

    def request_gpus(
        self,
        step: int,
        *,
        cluster: str = ACTOR,
        priority: str = DemandPriority.ACTOR_TRAINING,
        devices: Sequence[Mapping[str, Any]] | None = None,
        timeout: float = 600.0,
        on_progress: Progress | None = None,
    ) -> Grant:
        """Have the engines on the train GPUs go to sleep; return when these GPUs are free for step ``step``.

        Free means: every engine on them is Offloaded or gone, and the whole device's memory in use is within the
        pool's residualMemoryGiB. ``devices``: ``[{"node": ..., "devices": [UUID, ...]}]``, default: the whole train
        pool. ``cluster``: which part of the trainer asks; one request each. ``on_progress``: called with (reason, what
        it waits for). Raises GrantTimeout with what stood in the way, and DemandRefused where these GPUs can never
        come free; the request is withdrawn then.
        """
        now = time.monotonic()
        wait = Wait(now, now + timeout, on_progress or say_nothing)
        request: Spec = {
            "cluster": cluster,
            "priority": str(DemandPriority(priority).value),
            "step": step,
            "id": uuid.uuid4().hex,
        }
        if devices is not None:
            request["devices"] = [dict(d) for d in devices]

        def seen(pipeline: RLPipeline) -> Grant | None:
            return next((g for g in pipeline.status.grants if g.cluster == cluster and g.id == request["id"]), None)

        def decided(pipeline: RLPipeline) -> bool:
            grant = seen(pipeline)
            if grant is None or grant.granted:
                if grant is None:
                    wait.tell(_NOT_SEEN, _unanswered(pipeline))
                return grant is not None
            wait.tell(grant.reason, grant.message)
            return grant.reason == Reason.UNSUPPORTED.value

        with self._writing:
            self._demand = None  # whoever waits for an answer must have asked the pipeline that is there now
        try:
            # At least one whole call: a short wait for GPUs is no reason to give the apiserver up.
            self._write(lambda spec: _with_request(spec, cluster, request), max(timeout, CALL_SECONDS))
            pipeline = self._pipeline_until(wait, decided)
            found = seen(pipeline)
            if found is None or not found.granted:
                reason = found.reason if found is not None else _NOT_SEEN
                why = f"{found.reason}: {found.message}" if found is not None else _unanswered(pipeline)
                if reason == Reason.UNSUPPORTED.value:
                    raise errors.DemandRefused(f"GPUs for step {step} ({cluster}) can not be had: {why}")
                raise errors.GrantTimeout(
                    f"GPUs for step {step} ({cluster}) were not free within {timeout:g} s: {why}. The request was "
                    "withdrawn; engines that went to sleep for it wake again",
                    reason=reason,
                )
        except BaseException:
            self._give_back(cluster)
            raise
        return found

    def release_gpus(self, cluster: str = ACTOR, timeout: float = WRITE_SECONDS) -> bool:
        """Give GPUs back to the engines; returns whether any were asked for. Durable when it returns."""
        return self._write(lambda spec: _with_request(spec, cluster, None), timeout, over=_never)

    @contextmanager
    def train_gpus(self, step: int, *, cluster: str = ACTOR, **how: Any) -> Iterator[Grant]:
        """GPUs for a train step; given back at the end, whatever happened. Arguments as of ``request_gpus``."""
        grant = self.request_gpus(step, cluster=cluster, **how)
        try:
            yield grant
        except BaseException:
            self._give_back(cluster)
            raise
        self.release_gpus(cluster)

    def before_train_step(self, step: int, **how: Any) -> Grant:
        """Wait until the train GPUs are free; call it before the train step wakes. Arguments as of ``request_gpus``."""
        return self.request_gpus(step, **how)

    def _give_back(self, cluster: str) -> None:
        """Release on the way out of an error; one that fails is said and does not hide the first."""
        try:
            self.release_gpus(cluster)
        except errors.ClientError as e:
            log.error("GPUs of %s could not be given back, engines on them stay asleep: %s", cluster, e)

    # ---------------------------------------------------------------------------------------------- writing

    def _write(
        self, change: Callable[[Spec], Spec], timeout: float = WRITE_SECONDS, *, over: Callable[[Spec], bool] = _always
    ) -> bool:
        """Change the TrainerDemand under its resourceVersion; False where there was nothing to change.

        ``over``: whether what another trainer process has there may be dropped for it.
        """
        until = time.monotonic() + timeout
        with self._writing:
            while True:
                if self._demand is None:
                    self._owner = self._pipeline(until).metadata.uid
                    self._demand = self._read(until)
                have = self._demand
                if have is not None and self._is_anothers(have) and not over(have["spec"]):
                    log.warning(
                        "the TrainerDemand is another trainer's by now, left alone: %s", have["spec"]["trainer"]
                    )
                    self._demand = None
                    return False
                wanted = change(self._mine(have))
                if have is not None and wanted == have["spec"] and not self._strays(have):
                    return False
                try:
                    self._demand = self._store(have, wanted, until)
                    return True
                except (Conflict, Exists, errors.DemandNotFound):
                    # An answer of ours was lost, another process of this trainer wrote, or the pipeline was recreated.
                    self._demand = None
                except Invalid as e:
                    raise errors.DemandRefused(f"TrainerDemand {self.namespace}/{self.pipeline_name}: {e}") from e

    def _read(self, until: float) -> dict[str, Any] | None:
        try:
            return self._api.get(DEMANDS, self.pipeline_name, until)
        except errors.DemandNotFound:
            return None

    def _is_anothers(self, have: Mapping[str, Any]) -> bool:
        return have["spec"]["trainer"]["podUID"] != self._pod_uid and not self._strays(have)

    def _mine(self, have: Mapping[str, Any] | None) -> Spec:
        trainer = {"podUID": self._pod_uid, **({"podName": self._pod_name} if self._pod_name else {})}
        if have is None or have["spec"]["trainer"] != trainer or self._strays(have):
            if have is not None and not self._strays(have):
                log.warning("taking over the TrainerDemand of trainer %s", have["spec"]["trainer"])
            return {"trainer": trainer, "streams": [], "requests": []}
        return {"streams": [], "requests": [], **have["spec"]}

    def _strays(self, have: Mapping[str, Any]) -> bool:
        """It belongs to an earlier pipeline of the same name: the operator would not look at it."""
        owners = have["metadata"].get("ownerReferences") or []
        return not any(o.get("uid") == self._owner for o in owners)

    def _store(self, have: Mapping[str, Any] | None, spec: Spec, until: float) -> dict[str, Any]:
        kind = {"apiVersion": labels.API_VERSION, "kind": "RLPipeline"}
        owners = [{**kind, "name": self.pipeline_name, "uid": self._owner}]
        if have is None:
            body = {
                "apiVersion": labels.API_VERSION,
                "kind": "TrainerDemand",
                "metadata": {"name": self.pipeline_name, "namespace": self.namespace, "ownerReferences": owners},
                "spec": spec,
            }
            return self._api.create(DEMANDS, body, until)
        meta = {"resourceVersion": have["metadata"]["resourceVersion"], "ownerReferences": owners}
        # null removes what another trainer had and this one has not.
        patch = {"metadata": meta, "spec": {**spec, "trainer": {"podName": None, **spec["trainer"]}}}
        return self._api.merge(DEMANDS, self.pipeline_name, patch, until)


def _unanswered(pipeline: RLPipeline) -> str:
    running = pipeline.status.active_operation
    if running is None:
        return "no operator has answered the request"
    return f"{running.kind.value} {running.name} owns the engines, the request is answered when it has ended"


def _streams_of(spec: Mapping[str, Any]) -> dict[str, StreamProgress]:
    return {
        s["key"]: StreamProgress(s["key"], int(s.get("batch") or 0), int(s["target"]), int(s["collected"]))
        for s in spec.get("streams") or ()
    }


def _streams(demand: Mapping[str, Any] | None) -> dict[str, StreamProgress]:
    return _streams_of(demand["spec"]) if demand is not None else {}


def _worthless(before: Mapping[str, StreamProgress], after: Mapping[str, StreamProgress]) -> bool:
    old, new = aggregate(before.values()), aggregate(after.values())
    return new is not None and new.same_as(old)


def _with_streams(spec: Spec, streams: Mapping[str, StreamProgress]) -> Spec:
    rows = [
        {"key": s.key, "batch": s.batch, "target": s.target, "collected": s.collected}
        for s in sorted(streams.values(), key=lambda s: s.key)
    ]
    return {**spec, "streams": rows}


def _with_request(spec: Spec, cluster: str, request: Spec | None) -> Spec:
    kept = [r for r in spec["requests"] if r["cluster"] != cluster]
    return {**spec, "requests": [*kept, request] if request is not None else kept}
