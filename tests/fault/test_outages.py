"""The control plane dies, watches tell nothing or tell late, clocks are wrong: rounds end, and nobody is misled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster.programs import cache_folder
from e2e.scenarios.kit import TERMINAL, wait_until
from tests.fault.proxy import Watching
from tests.fault.scenarios import DISK, fleet_state, plain_round
from tests.fault.stand import Stand
from tests.fault.sweep import healthy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

KINDS = ("pods", "rlpipelines", "enginepools", "syncrounds")


def well(stand: Stand) -> None:
    """A plain round succeeds, all serve it, and nothing was broken on the way."""
    plain_round(stand)
    assert healthy(fleet_state(stand)), fleet_state(stand)
    assert not stand.violations()


def loading(stand: Stand, seconds: float) -> str:
    """Order a round whose loads take so long; its name, once engines load."""
    version = stand.next_version()
    stand.fleet.publish(version)
    for pod in stand.fleet.engines():
        stand.fleet.fault(pod, DISK, action="delay", seconds=seconds, times=1, when="before")
    name = stand.fleet.order(version)
    wait_until(lambda: stand.fleet.phase(name) in ("Transferring", *TERMINAL), "Transferring", every=0.02)
    return name


@pytest.mark.parametrize("program", ["etcd", pytest.param("kube-apiserver", marks=pytest.mark.slow)])
def test_the_control_plane_is_killed_while_engines_load(stand: Stand, program: str) -> None:
    name = loading(stand, 1.0)
    stand.cluster.restart(program)
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
    well(stand)


@pytest.mark.parametrize("mode", [Watching.HOLD, pytest.param(Watching.CLOSE, marks=pytest.mark.slow)])
def test_a_round_needs_no_watch_once_it_runs(stand: Stand, mode: Watching) -> None:
    """Its objects are read live; only that it was ordered is learned from a watch, or from the next poll."""
    stand.proxy.set_watching(mode, *KINDS)
    try:
        version = stand.next_version()
        stand.fleet.publish(version)
        done = stand.fleet.ended(stand.fleet.order(version))
        assert done["status"]["phase"] == "Succeeded", done["status"]
    finally:
        stand.proxy.set_watching(Watching.PASS, *KINDS)
    well(stand)


def test_a_pod_whose_end_nobody_saw_is_replaced(stand: Stand) -> None:
    """While the watch was held a pod was deleted; then the stream ended with 410 and a list shows what is left."""
    gone = stand.fleet.engines()[0]
    stand.proxy.set_watching(Watching.HOLD, "pods")
    stand.cluster.kubectl(
        "delete", "pod", gone["metadata"]["name"], "-n", stand.namespace, "--force", "--grace-period=0"
    )
    wait_until(lambda: len(stand.fleet.engines()) == stand.engines - 1, "the pod to be gone")
    stand.proxy.set_watching(Watching.GONE, "pods")
    wait_until(
        lambda: any(c.fault or c.ended for c in stand.journal.calls if c.label == "WATCH pods"), "streams to end"
    )
    stand.proxy.set_watching(Watching.PASS, "pods")
    pods = stand.fleet.ready_engines(stand.engines)
    assert gone["metadata"]["uid"] not in {p["metadata"]["uid"] for p in pods}
    well(stand)


def faketime() -> Path:
    """libfaketime: the system's, or the package of the same name unpacked into the cache folder. Skips without."""
    for folder in (Path("/usr/lib"), kept := cache_folder() / "libfaketime"):
        for found in folder.glob("**/faketime/libfaketime.so.1"):
            return found
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("needs libfaketime (Debian: apt-get install libfaketime)")
    kept.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["apt-get", "download", "libfaketime"], cwd=kept, capture_output=True, timeout=60, check=False
    )
    packages = list(kept.glob("*.deb"))
    if done.returncode != 0 or not packages:
        pytest.skip("needs libfaketime (apt-get install libfaketime); it could not be downloaded")
    subprocess.run(["dpkg", "-x", packages[0], kept], check=True, timeout=60)
    return next(kept.glob("**/faketime/libfaketime.so.1"))


@pytest.mark.slow
@pytest.mark.parametrize("shift", ["+1h", "-1h"])
def test_an_operator_whose_clock_is_an_hour_off(make_stand: Callable[..., Stand], shift: str) -> None:
    """Times of record are the apiserver's; the operator's own clock only measures how long things take."""
    environment = {"LD_PRELOAD": str(faketime()), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    stand = make_stand(operator_env=environment)
    name = loading(stand, 2.0)
    stand.operators[0].kill()
    stand.operator.env.update(dict.fromkeys(environment, ""))  # the successor's clock is right
    stand.restart()
    done = stand.fleet.ended(name)
    assert done["status"]["phase"] in ("Succeeded", "Failed"), done["status"]
    well(stand)
