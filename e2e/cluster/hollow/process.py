"""A container as a process of the host: its own session and process group, a log file, an exit code as Kubernetes says.

Nothing survives the end of the container: its process group is killed when the first process exits, and the kernel
kills that process when the hollow kubelet itself dies (parent-death signal). What escapes both (a child that left the
group) is found by the cluster's mark in its environment when the cluster goes down.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from e2e.cluster.nursery import Forked, Nursery


class StartError(Exception):
    """The command cannot be executed at all."""


class HostProcess:
    """A started process. ``exit_code`` is None while it runs; ``environment`` is what it was started with.

    ``nurseries`` bear those that they can, once they are ready; what has torch among its arguments is for the last.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        nurseries: Sequence[Nursery] = (),
    ) -> None:
        path = environment.get("PATH", os.defpath)
        program = shutil.which(command[0], path=path) if "/" not in command[0] else command[0]
        if program is None or not os.access(program, os.X_OK):
            raise StartError(f'exec: "{command[0]}": executable file not found in $PATH')
        self._process = self._born(nurseries, program, command, environment, folder, log) or self._started(
            program, command, environment, folder, log
        )
        self.pid = self._process.pid
        self.environment = dict(environment)
        self.exit_code: int | None = None
        self._ended = asyncio.Event()
        # A pid descriptor is readable when the process has ended: no thread and no polling per container.
        self._descriptor = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    @staticmethod
    def _born(
        nurseries: Sequence[Nursery],
        program: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
    ) -> Forked | None:
        if command[1:2] != ["-m"] or len(command) < 3 or os.path.realpath(program) != os.path.realpath(sys.executable):
            return None
        for nursery in reversed(nurseries) if "torch" in command else nurseries:
            if nursery.ready.is_set() and nursery.bears(command[2], environment):
                return nursery.fork(command[2], command[3:], environment, str(folder), str(log), kept=True)
        return None

    @staticmethod
    def _started(
        program: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        # setpriv replaces itself by the program: same pid. Forking with a Python hook instead would be neither
        # safe beside threads nor fast. It reads no options after the program's own name.
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        try:
            with log.open("ab") as output:
                return subprocess.Popen(
                    [*prefix, program, *command[1:]],
                    env=dict(environment),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(str(error)) from error

    async def wait(self) -> int:
        """Returns the exit code; 128 + N for a process that signal N ended."""
        await self._ended.wait()
        assert self.exit_code is not None
        return self.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children. Without effect after its end."""
        if self.exit_code is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def _end(self) -> None:
        # The group goes first, while the unreaped leader still keeps its number from being reused.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        if isinstance(self._process, Forked):
            self._process.reap()
        code = self._process.wait()
        self.exit_code = code if code >= 0 else 128 - code
        self._ended.set()
