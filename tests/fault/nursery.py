"""Operators that a nursery bears: a sweep starts a thousand of them."""

from __future__ import annotations

import os
from typing import IO

from e2e.cluster.nursery import Nursery
from e2e.scenarios.kit import ROOT, Operator, Process

_MODULE = "rlfleet.app.cli"


def operators() -> Nursery:
    """A nursery of operators; the command line imports the operator only when it runs it."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    return Nursery([_MODULE, "tests.fault.imported"], environment)


class NurseryOperator(Operator):
    """An operator that a nursery starts, where that makes no difference."""

    nursery: Nursery

    def spawn(self, arguments: list[str], env: dict[str, str], out: IO[bytes]) -> Process:
        if not self.nursery.bears(_MODULE, env):
            return super().spawn(arguments, env, out)
        return self.nursery.fork(_MODULE, arguments, env, str(self.folder), str(self.log))
