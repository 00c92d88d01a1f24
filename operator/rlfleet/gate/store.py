"""What the gate must not forget, in one SQLite file on the pod's disk volume.

Invariants:
- every change is on disk (fsync) before the method returns, and the caller acts only after that; a SIGKILL at any
  instruction leaves the state before or after a change, never between;
- calls are synchronous on purpose: between reading the fence and storing a higher one no other task can run. A disk
  that hangs stops the gate, which is right, for without the disk it may not act;
- a file that can not be read stops the gate. Starting with an empty state instead would forget the fence.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlfleet.api.fencing import Fence
from rlfleet.api.wire import EnrollRequest, HoldsRecord, LoadRecord, OperationRecord, OperationState
from rlfleet.gate.tags import MemoryRecord

SCHEMA = 1
#: Operations kept in the log; far more than one round needs, so attempts of the latest operations are always known.
MAX_OPERATIONS = 512
MAX_LOADS = 8
#: Names of earlier engine containers that are remembered; no view of pods lags behind by so many restarts.
PAST_PROCESSES = 32


class StoreError(Exception):
    """The state can not be read or written; the gate must not go on."""


class Store:
    """Fence, enrolment, incarnation, pause record, proof of weights, loads and the operation log."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "gate.sqlite"
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=5)
            # FULL: a commit is fsynced. The lock stops a second gate over the same state (a container that is being
            # replaced while its old process still ends).
            self._db.executescript(
                "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
                "BEGIN IMMEDIATE;"
                "CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;"
                "CREATE TABLE IF NOT EXISTS operations (id TEXT PRIMARY KEY, seq INTEGER UNIQUE NOT NULL,"
                " order_text TEXT NOT NULL, step_key TEXT NOT NULL, record TEXT NOT NULL,"
                " settled INTEGER NOT NULL) STRICT;"
                "CREATE TABLE IF NOT EXISTS loads (id TEXT PRIMARY KEY, seq INTEGER UNIQUE NOT NULL,"
                " record TEXT NOT NULL) STRICT;"
                "COMMIT;"
            )
            schema = self._get("schema")
            if schema is None:
                self._put("schema", SCHEMA)
            elif schema != SCHEMA:
                raise StoreError(f"{self._path} has schema {schema}, this gate knows {SCHEMA}: replace the pod")
            _sync_directory(directory)
        except (sqlite3.Error, ValueError) as e:
            raise StoreError(f"{self._path} can not be used: {e}; replace the pod") from e

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside become durable together, or none does."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, value: Any) -> None:
        if value is None:
            self._db.execute("DELETE FROM facts WHERE key = ?", (key,))
        else:
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))

    # ------------------------------------------------------------------------------------------ facts

    @property
    def fence(self) -> Fence:
        """The highest fence stored so far."""
        value = self._get("fence")
        return Fence() if value is None else Fence(**value)

    @fence.setter
    def fence(self, fence: Fence) -> None:
        self._put("fence", {"pipeline": fence.pipeline, "operation": fence.operation, "generation": fence.generation})

    @property
    def enrolment(self) -> EnrollRequest | None:
        """The latest accepted enrolment."""
        value = self._get("enrolment")
        return None if value is None else EnrollRequest.model_validate(value)

    @enrolment.setter
    def enrolment(self, request: EnrollRequest) -> None:
        self._put("enrolment", request.wire())

    @property
    def public_keys(self) -> dict[str, str] | None:
        """Keys delivered by an enrolment; they replace those of the environment."""
        value: dict[str, str] | None = self._get("publicKeys")
        return value

    @public_keys.setter
    def public_keys(self, keys: dict[str, str]) -> None:
        self._put("publicKeys", keys)

    @property
    def incarnation(self) -> str | None:
        """Nonce of the engine process; None before the start-up promise was kept."""
        value: str | None = self._get("incarnation")
        return value

    @incarnation.setter
    def incarnation(self, value: str) -> None:
        self._put("incarnation", value)

    @property
    def engine_process(self) -> str | None:
        """What the kubelet called the engine's container when it was last told; None: it never was."""
        value: str | None = self._get("engineProcess")
        return value

    @engine_process.setter
    def engine_process(self, value: str) -> None:
        self._put("engineProcess", value)

    @property
    def past_processes(self) -> tuple[str, ...]:
        """What the engine's containers before this one were called, as far as they are remembered."""
        return tuple(self._get("pastProcesses") or ())

    @past_processes.setter
    def past_processes(self, value: Sequence[str]) -> None:
        self._put("pastProcesses", list(value)[-PAST_PROCESSES:])

    @property
    def engine_instance(self) -> str | None:
        """What the engine called its own process when it last said so; None: it never did."""
        value: str | None = self._get("engineInstance")
        return value

    @engine_instance.setter
    def engine_instance(self, value: str | None) -> None:
        self._put("engineInstance", value)

    @property
    def engine_listener(self) -> str | None:
        """The socket of the engine process that this record is about (gate.listener); None: never seen."""
        value: str | None = self._get("engineListener")
        return value

    @engine_listener.setter
    def engine_listener(self, value: str) -> None:
        self._put("engineListener", value)

    @property
    def met_before_told(self) -> bool:
        """The present process was met by its socket; the kubelet's name of its container was not told since."""
        return bool(self._get("metBeforeTold"))

    @met_before_told.setter
    def met_before_told(self, value: bool) -> None:
        self._put("metBeforeTold", value)

    @property
    def told_before_met(self) -> bool:
        """The kubelet's name of a container was told whose process was not met by a socket since."""
        return bool(self._get("toldBeforeMet"))

    @told_before_met.setter
    def told_before_met(self, value: bool) -> None:
        self._put("toldBeforeMet", value)

    @property
    def paused(self) -> bool:
        """A pause was verified and no resume was asked since. Says nothing while the engine admits requests."""
        return bool(self._get("paused")) and self._get("pausedListener") in (None, self.engine_listener)

    def put_paused(self, value: bool, listener: str | None = None) -> None:
        """``listener``: the socket of the process that was paused; None: not known, the one of this record."""
        self._put("paused", value)
        self._put("pausedListener", listener)

    @property
    def seen_admitting(self) -> bool:
        """The engine was seen to admit requests once, so "not ready" has another cause than never having started."""
        return bool(self._get("seenAdmitting")) and self.seen_listener in (None, self.engine_listener)

    @property
    def seen_listener(self) -> str | None:
        """The socket of the process that was seen to; None: not known, the one of this record."""
        value: str | None = self._get("seenListener")
        return value

    def saw_admitting(self, listener: str | None) -> None:
        """The engine admits requests. ``listener``: its socket, if known."""
        self._put("seenAdmitting", True)
        self._put("seenListener", listener)

    @property
    def checksum_meaningful(self) -> bool | None:
        """Whether the engine's checksums depend on its weights; None: not asked yet. Holds for all its life."""
        value: bool | None = self._get("checksumMeaningful")
        return value

    @checksum_meaningful.setter
    def checksum_meaningful(self, value: bool) -> None:
        self._put("checksumMeaningful", value)

    @property
    def holds(self) -> HoldsRecord | None:
        """The weights that are proven for this incarnation."""
        value = self._get("holds")
        return None if value is None else HoldsRecord.model_validate(value)

    @holds.setter
    def holds(self, value: HoldsRecord | None) -> None:
        self._put("holds", None if value is None else value.wire())

    @property
    def staging(self) -> dict[str, Any] | None:
        """What the latest Prepare asked for (gate.staging); None: nothing is expected."""
        value: dict[str, Any] | None = self._get("staging")
        return value

    @staging.setter
    def staging(self, value: dict[str, Any] | None) -> None:
        self._put("staging", value)

    @property
    def load_context(self) -> dict[str, Any] | None:
        """What was true before the latest load began (gate.loads)."""
        value: dict[str, Any] | None = self._get("loadContext")
        return value

    @load_context.setter
    def load_context(self, value: dict[str, Any]) -> None:
        self._put("loadContext", value)

    @property
    def memory(self) -> MemoryRecord:
        """Which parts of the engine's device memory are given back, or may be."""
        return MemoryRecord.of(self._get("memory"))

    @memory.setter
    def memory(self, value: MemoryRecord) -> None:
        self._put("memory", value.durable())

    @property
    def router_add_since_ms(self) -> int | None:
        """When a router was asked to add our URL without a recorded end of its job; None: no such job can exist."""
        value: int | None = self._get("routerAddSinceMs")
        return value

    @router_add_since_ms.setter
    def router_add_since_ms(self, value: int | None) -> None:
        self._put("routerAddSinceMs", value)

    def forget_process(self, incarnation: str, listener: str | None = None) -> None:
        """Another engine process stands beside this gate: what was proven, paused, loaded or released is not its own.

        Fence, enrolment, staged bytes and the log of operations stay; what had no known end ended with its process.
        ``listener``: the socket of the process that is met. An order may have reached it before it was met, and found
        it ready, or paused it: that stays known, for where the engine does not tell it nobody could find it out again.
        """
        for flag, its in (("paused", "pausedListener"), ("seenAdmitting", "seenListener")):
            if listener is None or self._get(its) != listener:
                self._put(flag, None)
                self._put(its, None)
        for key in ("checksumMeaningful", "holds", "loadContext", "memory"):
            self._put(key, None)
        self._db.execute("DELETE FROM loads")
        self.settle([r.id for r in self.unsettled()])
        self.incarnation = incarnation

    # ------------------------------------------------------------------------------------------ operations

    def operation(self, op_id: str) -> tuple[OperationRecord, str] | None:
        """The record of an operation and the canonical text of its order."""
        row = self._db.execute("SELECT record, order_text FROM operations WHERE id = ?", (op_id,)).fetchone()
        return None if row is None else (OperationRecord.model_validate_json(row[0]), row[1])

    def add_operation(self, record: OperationRecord, order_text: str, step_key: str) -> None:
        """Log the start of an operation; drops the oldest settled ones beyond MAX_OPERATIONS."""
        self._db.execute(
            "INSERT INTO operations VALUES (?, (SELECT coalesce(max(seq), 0) + 1 FROM operations), ?, ?, ?, 1)",
            (record.id, order_text, step_key, record.model_dump_json()),
        )
        self._db.execute(
            "DELETE FROM operations WHERE settled = 1 AND seq <= (SELECT max(seq) FROM operations) - ?",
            (MAX_OPERATIONS,),
        )

    def update_operation(self, record: OperationRecord, *, settled: bool = True) -> None:
        """Replace an operation's record. ``settled`` False: its effect on the engine is unknown."""
        self._db.execute(
            "UPDATE operations SET record = ?, settled = ? WHERE id = ?",
            (record.model_dump_json(), int(settled), record.id),
        )

    def running(self) -> list[OperationRecord]:
        """Operations without a recorded end."""
        return [r for r in self._records("SELECT record FROM operations") if r.state is OperationState.RUNNING]

    def unsettled(self) -> list[OperationRecord]:
        """Operations whose effect is unknown, oldest first."""
        return list(self._records("SELECT record FROM operations WHERE settled = 0 ORDER BY seq"))

    def settle(self, op_ids: list[str]) -> None:
        """These operations can have no further effect; their state stays Unknown."""
        self._db.executemany("UPDATE operations SET settled = 1 WHERE id = ?", [(i,) for i in op_ids])

    def attempts(self, limit: int = 64) -> dict[str, int]:
        """ "operationUID/Kind" -> highest attempt, for the latest operations."""
        rows = self._db.execute("SELECT step_key, record FROM operations ORDER BY seq DESC LIMIT ?", (limit,))
        highest: dict[str, int] = {}
        for key, text in rows:
            attempt = int(json.loads(text).get("attempt", 1))
            highest[key] = max(highest.get(key, 0), attempt)
        return highest

    def _records(self, query: str) -> Iterator[OperationRecord]:
        for (text,) in self._db.execute(query).fetchall():
            yield OperationRecord.model_validate_json(text)

    # ------------------------------------------------------------------------------------------ loads

    def loads(self) -> list[LoadRecord]:
        """Loads begun at this engine, latest last, at most MAX_LOADS."""
        rows = self._db.execute("SELECT record FROM loads ORDER BY seq DESC LIMIT ?", (MAX_LOADS,)).fetchall()
        return [LoadRecord.model_validate_json(text) for (text,) in reversed(rows)]

    def latest_load(self) -> tuple[str, LoadRecord] | None:
        """The newest load with the id of the operation that ran it."""
        row = self._db.execute("SELECT id, record FROM loads ORDER BY seq DESC LIMIT 1").fetchone()
        return None if row is None else (row[0], LoadRecord.model_validate_json(row[1]))

    def running_loads(self) -> list[tuple[str, LoadRecord]]:
        """Loads without a recorded end."""
        rows = self._db.execute("SELECT id, record FROM loads").fetchall()
        loads = [(op_id, LoadRecord.model_validate_json(text)) for op_id, text in rows]
        return [(op_id, load) for op_id, load in loads if load.state is OperationState.RUNNING]

    def put_load(self, op_id: str, record: LoadRecord) -> None:
        """Record a load's start or progress."""
        self._db.execute(
            "INSERT INTO loads VALUES (?, (SELECT coalesce(max(seq), 0) + 1 FROM loads), ?)"
            " ON CONFLICT (id) DO UPDATE SET record = excluded.record",
            (op_id, record.model_dump_json()),
        )
        self._db.execute("DELETE FROM loads WHERE seq <= (SELECT max(seq) FROM loads) - ?", (4 * MAX_LOADS,))


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
