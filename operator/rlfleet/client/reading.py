"""Seeing one RLPipeline: connecting to its apiserver, reading it, waiting for it to change.

Invariant: a watch only says that it is time to read; whatever ends it, the object is read again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from rlfleet.api.v1alpha1 import EnginePool, RLPipeline
from rlfleet.api.v1alpha1.common import DNS_LABEL
from rlfleet.api.v1alpha1.rlpipeline_status import CommittedVersion
from rlfleet.client import credentials, errors
from rlfleet.client.api import PIPELINES, POOLS, Api
from rlfleet.client.waiting import Wait, say_nothing

K = TypeVar("K", RLPipeline, EnginePool)

#: A watch that ends at once (forbidden, unsupported by a proxy) must not become a busy loop.
_POLL_SECONDS = 0.5


class Reader:
    """One pipeline, to be read and waited for. See Client for credentials."""

    def __init__(
        self,
        namespace: str,
        pipeline: str,
        kubeconfig: str | os.PathLike[str] | None = None,
        *,
        context: str | None = None,
    ) -> None:
        for field, value in (("namespace", namespace), ("pipeline", pipeline)):
            if not isinstance(value, str) or len(value) > 63 or not re.match(DNS_LABEL, value):
                raise ValueError(
                    f"{field}: {str(value)[:80]!r} cannot be the name of a {field}: use 1 to 63 lower-case letters, "
                    "digits and '-'"
                )
        self.namespace = namespace
        self.pipeline_name = pipeline
        self._api = Api(credentials.find(kubeconfig, context), namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    # ---------------------------------------------------------------------------------------------- reading

    def pipeline(self, timeout: float = 30.0) -> RLPipeline:
        """The RLPipeline as it is now."""
        return self._pipeline(time.monotonic() + timeout)

    def _pipeline(self, until: float) -> RLPipeline:
        return RLPipeline.from_dict(self._api.get(PIPELINES, self.pipeline_name, until))

    def pools(self, timeout: float = 30.0) -> list[EnginePool]:
        """All EnginePools of the namespace as they are now. Needs ``list`` on enginepools."""
        listed = self._api.get(POOLS, "", time.monotonic() + timeout)
        kind = {"apiVersion": listed["apiVersion"], "kind": "EnginePool"}
        return [EnginePool.from_dict({**kind, **item}) for item in listed["items"]]

    def public_keys(self, timeout: float = 60.0) -> dict[str, str]:
        """The operator's public keys, ``{kid: base64}``, for WeightSender; waits until there are some."""
        found = self._pipeline_when(
            lambda p: bool(p.status.public_keys),
            timeout,
            f"status.publicKeys of RLPipeline {self.namespace}/{self.pipeline_name}: is the rlfleet operator running?",
        )
        return {key.kid: key.key for key in found.status.public_keys}

    def wait_for(self, version: int, timeout: float = 600.0) -> CommittedVersion:
        """Wait until at least this version is committed, by whomever; WaitTimeout otherwise."""
        found = self._pipeline_when(
            lambda p: p.status.committed is not None and p.status.committed.version >= version,
            timeout,
            f"version {version} of RLPipeline {self.namespace}/{self.pipeline_name} to be committed",
        )
        assert found.status.committed is not None
        return found.status.committed

    def wait_for_sender(self, version: int, timeout: float = 600.0) -> None:
        """Wait until the operator sees that the sender's newest complete weights are this version's; else WaitTimeout.

        A round for it can be carried out from then on.
        """

        def holds(p: RLPipeline) -> bool:
            return p.status.cache_ready is not None and p.status.cache_ready.version == version

        self._pipeline_when(holds, timeout, f"the sender of RLPipeline {self.pipeline_name} to hold version {version}")

    def wait_for_pool(self, name: str, wanted: Callable[[EnginePool], bool], timeout: float = 600.0) -> EnginePool:
        """The EnginePool once it is as wanted, or as it was last seen when the time is over.

        Needs ``get`` on enginepools; with ``watch`` it hears of changes at once.
        """
        wait = Wait(time.monotonic(), time.monotonic() + timeout, say_nothing)
        return self._until(POOLS, name, EnginePool.from_dict, wait, wanted)

    def _pipeline_when(self, wanted: Callable[[RLPipeline], bool], timeout: float, what: str) -> RLPipeline:
        wait = Wait(time.monotonic(), time.monotonic() + timeout, say_nothing)
        found = self._pipeline_until(wait, wanted)
        if not wanted(found):
            raise errors.WaitTimeout(f"waited {timeout:g} s for {what}")
        return found

    def _pipeline_until(self, wait: Wait, wanted: Callable[[RLPipeline], bool]) -> RLPipeline:
        """The pipeline once it is as wanted, or as it was last seen when the time is over."""
        return self._until(PIPELINES, self.pipeline_name, RLPipeline.from_dict, wait, wanted)

    def _until(
        self, plural: str, name: str, read: Callable[[dict[str, Any]], K], wait: Wait, wanted: Callable[[K], bool]
    ) -> K:
        """An object once it is as wanted, or as it was last seen when the time is over."""
        while True:
            raw = self._api.get(plural, name, wait.call_until())
            found = read(raw)
            if wanted(found) or wait.left() <= 0:
                return found
            opened = time.monotonic()
            for kind, obj in self._api.watch(plural, name, raw["metadata"]["resourceVersion"], wait.until):
                if kind == "DELETED":
                    break
                found = read(obj)
                if wanted(found):
                    return found
            self._breathe(opened, wait)

    @staticmethod
    def _breathe(opened: float, wait: Wait) -> None:
        pause = min(_POLL_SECONDS - (time.monotonic() - opened), wait.left())
        if pause > 0:
            time.sleep(pause)
