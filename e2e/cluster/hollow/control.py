"""The command channel of the hollow kubelet: one JSON line each way over a unix socket in its folder.

The socket is reached through an open directory handle, because a state folder's path may be longer than the 108 bytes
that a socket address holds.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOCKET_NAME = "control.sock"
_TIMEOUT_SECONDS = 120.0


class HollowError(Exception):
    """The hollow kubelet refused a command, or does not run."""


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """The socket's path through /proc/self/fd, valid inside the block."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


class HollowControl:
    """Commands to the hollow kubelet of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def crash(self, namespace: str, pod: str, container: str) -> None:
        """SIGKILL to the container and its children. Returns when it has ended."""
        self._call("crash", namespace, pod, container)

    def freeze(self, namespace: str, pod: str, container: str, spared: bool = False) -> None:
        """SIGSTOP to the container and its children: it keeps its connections and answers nothing.

        Its liveness probe ends it in the end. Not so if ``spared``: then it is silent like one that only its kubelet
        reaches, for as long as a slow machine may take to come to the thaw.
        """
        self._call("freeze", namespace, pod, container, spared=spared)

    def stall(self, namespace: str, beginning: str, container: str) -> None:
        """The next container of this name that starts in a pod whose name begins so is frozen from its first moment."""
        self._call("stall", namespace, beginning, container)

    def thaw(self, namespace: str, pod: str, container: str) -> None:
        """SIGCONT to a frozen container. One that was ended while it was frozen, by its liveness probe, needs none."""
        self._call("thaw", namespace, pod, container)

    def pid(self, namespace: str, pod: str, container: str) -> int:
        """The pid of the container's process (its process group has the same number)."""
        return int(self._call("pid", namespace, pod, container)["pid"])

    def environment(self, namespace: str, pod: str, container: str) -> dict[str, str]:
        """The variables that the container's process was started with."""
        return dict(self._call("environment", namespace, pod, container)["environment"])

    def log(self, namespace: str, pod: str, container: str) -> Path:
        """The file with the container's output, all its restarts included."""
        return Path(self._call("log", namespace, pod, container)["path"])

    def _call(self, command: str, namespace: str, pod: str, container: str, **more: bool) -> dict[str, Any]:
        request = {"command": command, "namespace": namespace, "pod": pod, "container": container, **more}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(_TIMEOUT_SECONDS)
            try:
                with short_path(self._folder) as path:
                    channel.connect(path)
            except OSError as error:
                raise HollowError(f"the hollow kubelet does not answer in {self._folder}: {error}") from error
            channel.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while chunk := channel.recv(65536):
                answer += chunk
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise HollowError(reply["error"])
        return reply
