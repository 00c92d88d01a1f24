"""Detached processes of one local cluster, found again by a later command.

A process is known by pid *and* kernel start time *and* the cluster's mark in its environment: a pid alone is reused
sooner or later, and a stale pid file must never get an innocent process killed. The mark is inherited by every
descendant, so ``sweep`` finds also what lost its parent.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CLUSTER_MARK = "RLFLEET_LOCAL_CLUSTER"
_NSENTER = "/usr/bin/nsenter"


@dataclass(frozen=True)
class Process:
    """A process that was started for a cluster."""

    name: str
    pid: int
    start_ticks: int
    program: str

    def alive(self) -> bool:
        """Whether this very process (not a later one with its pid) still runs. A zombie does not run."""
        stat = _stat(self.pid)
        if stat is None or stat[0] in "ZX" or stat[1] != self.start_ticks:
            return False
        command = _read(self.pid, "cmdline").split(b"\0")[0].decode(errors="replace")
        # Empty for a moment at its start, before the program's image is in place; or still on its way into a namespace.
        return not command or command == _NSENTER or self.program in command


def start(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    record: Path,
    namespace: Path | None = None,
) -> Process:
    """Starts ``command`` in its own session, output appended to ``log``, and records it in the file ``record``.

    ``namespace`` is the file of a network namespace that the process enters first (needs root); it becomes the command
    itself, so pid and record stay true.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    # posix_spawn instead of Popen: the process outlives this one on purpose, and a Popen object would complain.
    inside = [] if namespace is None else [_NSENTER, f"--net={namespace}", "--"]
    pid = os.posix_spawn(
        (*inside, *command)[0],
        [*inside, *command],
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE),
    )
    stat = _stat(pid)
    process = Process(name, pid, stat[1] if stat else 0, os.path.basename(command[0]))
    temporary = record.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(process)))
    os.replace(temporary, record)
    return process


def load(record: Path) -> Process | None:
    """Reads a record that ``start`` wrote; None when there is none."""
    try:
        return Process(**json.loads(record.read_text()))
    except FileNotFoundError:
        return None


def stop(processes: Iterable[Process], *, grace_seconds: float) -> None:
    """SIGTERM to each process's session, SIGKILL to those that still run after the grace period. Returns when gone."""
    living = [p for p in processes if p.alive()]
    for process in living:
        _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    killed = False
    while living:
        for process in living:
            _reap(process.pid)
        living = [p for p in living if p.alive()]
        if living and not killed and time.monotonic() > deadline:
            killed = True
            for process in living:
                _signal_group(process.pid, signal.SIGKILL)
        if living:
            time.sleep(0.02)


def kill(process: Process) -> None:
    """SIGKILL to the process alone; returns when it is gone altogether.

    A zombie is not gone: while threads of it are still ending, its sockets are open, and its port is taken.
    """
    while (stat := _stat(process.pid)) is not None and stat[1] == process.start_ticks:
        _kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap(process.pid)


def command(process: Process) -> list[str]:
    """The command line of a running process; empty for one that is gone."""
    return [word.decode() for word in _read(process.pid, "cmdline").split(b"\0")[:-1]] if process.alive() else []


def marked(mark: str) -> list[int]:
    """Pids of all running processes whose environment carries this cluster's mark."""
    needle = f"{CLUSTER_MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        pid = int(entry)
        stat = _stat(pid)
        if stat is not None and stat[0] not in "ZX" and needle in _read(pid, "environ").split(b"\0"):
            found.append(pid)
    return found


def sweep(mark: str) -> list[int]:
    """Kills everything that still carries the mark. Returns the pids that had to be killed."""
    killed: list[int] = []
    # More than one pass: a process may fork between the listing and its own death.
    while pids := marked(mark):
        for pid in pids:
            _kill(pid, signal.SIGKILL)
            _reap(pid)
        killed += pids
        time.sleep(0.02)
    return killed


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _kill(pid, number)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _reap(pid: int) -> None:
    """Collects the exit status when the process is a child of this one; otherwise init does it."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in ticks since boot."""
    text = _read(pid, "stat").decode(errors="replace")
    if not text:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
