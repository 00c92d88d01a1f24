"""Processes without the second of CPU time that a start of Python costs: a process that has imported the programs forks
one of them whenever it is asked to.

What is born is a process of its own, as with Popen: its environment, session and log; it is killed, stopped and waited
for by its pid, and ends with its nursery at the latest. ``python -m e2e.cluster.nursery MODULE...`` is the nursery: it
has one thread, and nothing of the programs has run in it, so nothing is shared but code. One thing differs:
/proc/PID/environ shows the nursery's.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
#: Variables that change a process before it runs a line of ours begin so.
_BEFORE_ALL = ("LD_", "PYTHON", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_")
_LIMIT_SECONDS = 120.0


class Forked:
    """One process of a nursery: the part of Popen's interface that tests use."""

    def __init__(self, pid: int, reap: Callable[[], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._fd = os.pidfd_open(pid)

    def end(self, code: int) -> None:
        """It has ended (negative: the signal that killed it)."""
        with self._lock:
            self.returncode = code
            os.close(self._fd)
        self._ended.set()

    def reap(self) -> None:
        """From now on its pid may become free: for those that were made with ``kept``."""
        self._reap()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, or raise TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
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
    """Enter it in the thread that the processes shall not outlive. Thread-safe.

    ``modules``: what can be run (``python -m``). ``environment``: the nursery's own.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.modules = tuple(modules)
        #: It has imported everything: a fork takes no time now.
        self.ready = threading.Event()
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._born = threading.Condition()
        self._pids: list[int] = []
        self._children: dict[int, Forked] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "e2e.cluster.nursery", *self.modules],
            env=self._environment,
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

    def bears(self, module: str, env: Mapping[str, str]) -> bool:
        """Whether a process of this module with this environment would be the same as one that was started."""

        def early(variables: Mapping[str, str]) -> dict[str, str]:
            return {name: value for name, value in variables.items() if name.startswith(_BEFORE_ALL)}

        return module in self.modules and early(env) == early(self._environment)

    def fork(
        self, module: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, log: str, *, kept: bool = False
    ) -> Forked:
        """A new process that runs the module with these arguments. ``kept``: its pid stays its own until ``reap``."""
        with self._lock:
            order = {"module": module, "argv": list(argv), "env": dict(env), "cwd": cwd, "log": log}
            self._say(order)
            with self._born:
                assert self._born.wait_for(lambda: self._pids, _LIMIT_SECONDS), "the nursery does not answer"
                pid = self._pids.pop()

            def reap() -> None:
                # A nursery that is dead has taken its children along.
                with self._lock, suppress(BrokenPipeError):
                    self._say({"reap": pid})

            child = self._children[pid] = Forked(pid, reap)
            if not kept:
                # Only now may its pid become free again: the child has a descriptor of it.
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
                if "pid" not in said:
                    self.ready.set()
                    continue
                if "code" in said:
                    self._children.pop(said["pid"]).end(said["code"])
                    continue
                with self._born:
                    self._pids.append(said["pid"])
                    self._born.notify_all()
        # Its children have ended with it.
        for child in list(self._children.values()):
            child.end(-signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ the nursery itself


def serve(modules: Sequence[str]) -> None:
    """Fork what standard input asks for, say who ended; until standard input ends."""
    for module in modules:
        importlib.import_module(module)
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"{module}.__main__")
        # Each child runs it anew; what it imports is what takes the time.
        sys.modules.pop(f"{module}.__main__", None)
    # Collections of a child shall not copy every page that it shares with its nursery.
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reaped: set[int] = set()
    buffer = b""
    _tell({})
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
            began, begin = os.pipe()
            pid = os.fork()
            if pid == 0:
                _live(parent, order, begin)
            os.close(begin)
            # Its end of file: the child has a process group, or is dead. Before that a signal to its group is lost.
            os.read(began, 1)
            os.close(began)
            _tell({"pid": pid})
        for pid in list(reaped):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                reaped.discard(pid)
                _tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _live(parent: int, order: dict[str, Any], begin: int) -> None:
    """The child: what an exec would do, then the command line. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.close(begin)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        sys.argv[:] = [order["module"], *order["argv"]]
        sys.path[0] = order["cwd"]
        if not hasattr(sys.modules[order["module"]], "__path__"):
            # As with ``python -m``, which has not imported what it runs.
            del sys.modules[order["module"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as an interpreter does at its end
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
