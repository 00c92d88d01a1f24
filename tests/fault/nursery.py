"""Operator processes without the second of CPU time that each start costs: a process that has imported the operator
forks one whenever it is asked to.

What is born is a process of its own, as with Popen: its environment, session and log; it is killed, stopped and waited
for by its pid, and ends with its nursery at the latest. ``python -m tests.fault.nursery`` is the nursery: it has one
thread, and nothing of the operator has run in it, so nothing is shared but code.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Self

from e2e.scenarios.kit import ROOT, Operator, Process

_PR_SET_PDEATHSIG = 1
#: What changes a process before it runs a line of ours: an operator with that is started as usual.
_BEFORE_ALL = ("LD_PRELOAD", "PYTHONPATH")
_LIMIT_SECONDS = 120.0


class Forked:
    """One process of a nursery: the part of Popen's interface that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._fd = os.pidfd_open(pid)

    def end(self, code: int) -> None:
        """It has ended (negative: the signal that killed it)."""
        with self._lock:
            self.returncode = code
            os.close(self._fd)
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, or raise TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("operator", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._fd, number)


class Nursery:
    """Enter it in the thread that the processes shall not outlive. Thread-safe."""

    def __init__(self) -> None:
        self.pythonpath = f"{ROOT / 'operator'}:{ROOT}"
        self._lock = threading.Lock()
        self._born = threading.Condition()
        self._pids: list[int] = []
        self._children: dict[int, Forked] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.fault.nursery"],
            env={**os.environ, "PYTHONPATH": self.pythonpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()

    def fork(self, argv: list[str], env: dict[str, str], cwd: str, log: str) -> Forked:
        """A new process that runs the command line with these arguments."""
        with self._lock:
            self._say({"argv": argv, "env": env, "cwd": cwd, "log": log})
            with self._born:
                assert self._born.wait_for(lambda: self._pids, _LIMIT_SECONDS), "the nursery does not answer"
                pid = self._pids.pop()
            child = self._children[pid] = Forked(pid)
            # Only now may its pid become free again.
            self._say({"reap": pid})
        return child

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                if "code" in said:
                    self._children.pop(said["pid"]).end(said["code"])
                    continue
                with self._born:
                    self._pids.append(said["pid"])
                    self._born.notify_all()


class NurseryOperator(Operator):
    """An operator that a nursery starts, where that makes no difference."""

    nursery: Nursery

    def spawn(self, arguments: list[str], env: dict[str, str], out: IO[bytes]) -> Process:
        usual = {"PYTHONPATH": self.nursery.pythonpath}
        if any(env.get(name) != usual.get(name) for name in _BEFORE_ALL):
            return super().spawn(arguments, env, out)
        return self.nursery.fork(arguments, env, str(self.folder), str(self.log))


# ------------------------------------------------------------------------------------------------ the nursery itself


def serve() -> None:
    """Fork what standard input asks for, say who ended; until standard input ends."""
    # What an operator imports when it runs.
    import rlfleet.app.cli
    import rlfleet.app.operator  # noqa: F401

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reaped: set[int] = set()
    buffer = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready:
            read = os.read(0, 1 << 16)
            if not read:
                return
            buffer += read
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "reap" in order:
                reaped.add(order["reap"])
                continue
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _live(parent, order)
            _tell({"pid": pid})
        for pid in list(reaped):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                reaped.discard(pid)
                _tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _live(parent: int, order: dict[str, Any]) -> None:
    """The child: what an exec would do, then the command line. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        from rlfleet.app.cli import main

        code = main(order["argv"])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:  # noqa: BLE001  as an interpreter does at its end
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
