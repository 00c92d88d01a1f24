"""Gates and engines that tests start by the hundred: forked by a nursery, where that makes no difference.

A nursery is made when the first process asks for it, in the main thread, and ends with the test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from e2e.cluster.nursery import Forked, Nursery

ROOT = Path(__file__).resolve().parents[1]
#: What a nursery has imported, with torch and without.
_MODULES = {False: ("rlfleet.gate", "e2e.sim.engine"), True: ("e2e.sim.engine", "e2e.sim.engine.groups")}
_PATH = f"{ROOT / 'operator'}:{ROOT}"


class Starter:
    """Starts processes for the tests of one run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._nurseries: dict[bool, Nursery] = {}

    def close(self) -> None:
        """End the nurseries, and with them all that they have borne."""
        self._stack.close()

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | Forked:
        """A process with this environment added to ours, which writes to the log."""
        environment = {**os.environ, "PYTHONPATH": _PATH, **env}
        if list(argv[:2]) == [sys.executable, "-m"]:
            nursery = self._nursery(torch="torch" in argv)
            if nursery.bears(argv[2], environment):
                return nursery.fork(argv[2], argv[3:], environment, str(ROOT), str(log))
        with log.open("ab") as out:
            return subprocess.Popen(list(argv), cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def _nursery(self, *, torch: bool) -> Nursery:
        if torch not in self._nurseries:
            made = Nursery(_MODULES[torch], {**os.environ, "PYTHONPATH": _PATH})
            self._nurseries[torch] = self._stack.enter_context(made)
        return self._nurseries[torch]


_current: list[Starter] = []


@contextmanager
def starting() -> Iterator[None]:
    """For as long as the tests run."""
    starter = Starter()
    _current.append(starter)
    try:
        yield
    finally:
        _current.pop()
        starter.close()


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | Forked:
    """``Starter.start`` of the run."""
    return _current[-1].start(argv, env, log)
