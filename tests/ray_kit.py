"""A local Ray for tests, which leaves nothing behind. Only inside a network namespace (``tests.netns``): it listens on
every interface, and looks for its own address outside."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.netns import INSIDE

#: Ray would otherwise write a token to the home folder and report its use.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def local_ray() -> Iterator[None]:
    """Ray on this machine while the block runs."""
    assert os.environ.get(INSIDE), "Ray is started in a network namespace only"
    # Its sockets' paths must be short, so it is not the test's own folder.
    folder = tempfile.mkdtemp(prefix="rlray-", dir="/tmp")
    os.environ |= {**ENVIRONMENT, "RAY_TMPDIR": folder}
    import ray

    try:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
