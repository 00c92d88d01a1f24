"""A network namespace of one's own, for programs that listen on every interface."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.netns import INSIDE


class NoNamespace(Exception):
    """None can be made here; the message says what it takes."""


def inside() -> bool:
    """This process already runs in one of ours."""
    return bool(os.environ.get(INSIDE))


def wrapped(command: Sequence[str]) -> list[str]:
    """A command line that becomes ``command`` in a new namespace with nothing but loopback. Raises NoNamespace.

    Whoever is not root gets one where the kernel lets users make their own.
    """
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None:
        raise NoNamespace("a network namespace needs the programs unshare (util-linux) and ip (iproute2)")
    for new in ([unshare, "-n"], [unshare, "-r", "-n"]):
        if subprocess.run([*new, "true"], capture_output=True, check=False).returncode == 0:
            return [*new, "--", "sh", "-c", f'{ip} link set lo up && exec "$@"', "sh", *command]
    raise NoNamespace("no network namespace can be made here: run this as root")


def environment() -> dict[str, str]:
    """Of what runs in it."""
    return os.environ | {INSIDE: "1"}
