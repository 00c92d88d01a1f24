"""The demo as a test, with fewer versions: it keeps its promises, leaves nothing behind, and its checks can fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.demo import report
from e2e.demo.__main__ import EXIT_BROKEN, EXIT_INTERRUPTED
from e2e.demo.leg import Leg
from e2e.demo.proof import Proof

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = 12
UNSYNCED = 8


def _start(tmp_path: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "KEEP", "MAKEFLAGS")}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env={
            **environment,
            "TMPDIR": str(tmp_path),
            "DEMO_VERSIONS": str(VERSIONS),
            "DEMO_UNSYNCED_VERSIONS": str(UNSYNCED),
            **more,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _processes(tmp_path: Path) -> list[tuple[int, bytes]]:
    """Pid and command line of each process that carries ``tmp_path`` in its environment or command line."""
    needle = str(tmp_path).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if needle in words or needle in environment:
                found.append((int(entry.name), words))
    return found


def _left_behind(tmp_path: Path) -> list[str]:
    """Files and processes of a demo whose temporary folder was ``tmp_path``."""
    return [
        *(str(path) for path in tmp_path.iterdir()),
        *(words.replace(b"\0", b" ").decode(errors="replace") for _, words in _processes(tmp_path)),
    ]


@pytest.mark.cluster
@pytest.mark.timeout(480)
def test_make_demo_keeps_its_promises_and_cleans_up(tmp_path: Path) -> None:
    # The environment that runs this test is the one that make would install.
    with _start(tmp_path, "make", "--old-file=.venv/.installed", "demo") as process:
        output, _ = process.communicate(timeout=450)
    assert process.returncode == 0, output
    assert "SIMULATED" in output
    rows = re.findall(r"^ +(base|\d+) +2 +2 +\d+ .*$", output, re.MULTILINE)
    assert rows == ["base", *map(str, range(VERSIONS))], output
    promises = re.findall(r"^(ok|FAIL) +(.*)$", output, re.MULTILINE)
    assert len(promises) == 8
    assert all(verdict == "ok" for verdict, _ in promises), output
    assert "check can fail" in output
    assert re.search(r"^rlpipeline.rlfleet.dev/demo .*$", output, re.MULTILINE)
    assert "DEMO OK" in output
    assert _left_behind(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_colocated_demo_keeps_its_promises_and_cleans_up(tmp_path: Path) -> None:
    words = ("make", "--old-file=.venv/.installed", "demo", "SCENARIO=colocated")
    with _start(tmp_path, *words, DEMO_VERSIONS="") as process:
        output, _ = process.communicate(timeout=450)
    assert process.returncode == 0, output
    assert "SIMULATED" in output
    promises = re.findall(r"^(ok|FAIL) +(.*)$", output, re.MULTILINE)
    assert len(promises) == 6
    assert all(verdict == "ok" for verdict, _ in promises), output
    assert "DEMO OK" in output
    assert _left_behind(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.timeout(480)
def test_a_broken_promise_fails_the_demo_and_keep_leaves_a_fleet_to_look_at(tmp_path: Path) -> None:
    # Four versions are too few for the reward to rise: that promise breaks, the others hold.
    words = (sys.executable, "-m", "e2e.demo", "--versions=4", "--unsynced-versions=4")
    with _start(tmp_path, *words, KEEP="1") as process:
        output, _ = process.communicate(timeout=400)
    try:
        assert process.returncode == EXIT_BROKEN, output
        broken = re.findall(r"^FAIL +(.*)$", output, re.MULTILINE)
        assert any("mean reward rises" in promise for promise in broken), output
        assert all("reward" in promise or "check can fail" in promise for promise in broken), output
        assert "DEMO FAILED" in output
        hints = [line.strip() for line in output[output.index("KEEP=1:") :].splitlines()]
        commands = [line for line in hints if line.startswith(("export ", "kubectl "))]
        assert sum(line.startswith("kubectl ") for line in commands) == 5, hints
        tried = subprocess.run(
            ["bash", "-euxc", "\n".join(commands)], capture_output=True, text=True, timeout=120, check=False
        )
        assert tried.returncode == 0, tried.stderr
        assert "enginepool.rlfleet.dev/engines scaled" in tried.stdout
    finally:
        stop = next((line.strip() for line in output.splitlines() if "e2e.cluster down" in line), "false")
        stopped = subprocess.run(["bash", "-euc", stop], capture_output=True, text=True, timeout=120, check=False)
    assert stopped.returncode == 0, stopped.stderr
    assert _left_behind(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("after", [pytest.param("kube-apiserver ready", marks=pytest.mark.slow), "trainer started"])
def test_an_interrupted_demo_cleans_up(after: str, tmp_path: Path) -> None:
    with _start(tmp_path, sys.executable, "-m", "e2e.demo") as process:
        assert process.stdout is not None
        seen = next(line for line in process.stdout if after in line)
        assert seen
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == EXIT_INTERRUPTED, output
    assert "interrupted" in output
    assert _left_behind(tmp_path) == []


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_demo_leaves_nothing_behind_either(tmp_path: Path) -> None:
    with _start(tmp_path, sys.executable, "-m", "e2e.demo") as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "trainer started" in line)
        process.kill()
    deadline = time.monotonic() + 90
    while left := _left_behind(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dead_trainer_ends_the_demo_with_its_last_lines(tmp_path: Path) -> None:
    with _start(tmp_path, sys.executable, "-m", "e2e.demo") as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "requests begin" in line)
        (trainer,) = (pid for pid, words in _processes(tmp_path) if b"e2e.sim.trainer" in words)
        os.kill(trainer, signal.SIGKILL)
        output = process.stdout.read()
    assert process.returncode == EXIT_BROKEN, output
    assert "container trainer of pod trainer ended with exit code 137" in output
    assert "--- trainer/trainer" in output
    assert _left_behind(tmp_path) == []


def test_too_few_versions_are_refused(tmp_path: Path) -> None:
    with _start(tmp_path, sys.executable, "-m", "e2e.demo", "--versions=3") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "at least 4" in output
    assert _left_behind(tmp_path) == []


# ---- each promise can be broken -------------------------------------------------------------------------------------


def _rounds() -> list[dict[str, Any]]:
    return [
        {
            "spec": {"version": version},
            "status": {"committed": True, "phase": "Succeeded", "plan": {"serialized": 2, "broadcast": 2}},
        }
        for version in range(-1, VERSIONS)
    ]


def _leg(*, learns: bool, versions: int) -> Leg:
    leg = Leg("leg")
    for version in range(versions):
        reward = 0.12 + (0.05 * version if learns else 0.0)
        leg.lines.append({"version": version, "sampledFrom": version - 1, "meanReward": reward, "logprobMaxDiff": 1e-6})
    leg.books = {"sent": 9, "answered": 9, "failed": 0, "inFlight": 0, "versions": {"-1": 4, "3": 5}}
    return leg


def _proof() -> Proof:
    return Proof({"engines-0": "abc", "engines-1": "abc"}, "abc")


def _broken(
    synced: Leg | None = None,
    unsynced: Leg | None = None,
    rounds: list[dict[str, Any]] | None = None,
    proof: Proof | None = None,
) -> list[str]:
    found = report.checks(
        synced or _leg(learns=True, versions=VERSIONS),
        unsynced or _leg(learns=False, versions=UNSYNCED),
        VERSIONS,
        _rounds() if rounds is None else rounds,
        proof or _proof(),
    )
    return [check.promise for check in found if not check.holds]


def test_all_promises_hold_for_a_good_run() -> None:
    assert _broken() == []


def test_a_missing_version_breaks_its_promise() -> None:
    (promise,) = _broken(rounds=_rounds()[:-1])
    assert "is committed" in promise


def test_a_round_of_one_transport_breaks_its_promise() -> None:
    rounds = _rounds()
    rounds[3]["status"]["plan"] = {"serialized": 4, "broadcast": 0}
    (promise,) = _broken(rounds=rounds)
    assert "both transports" in promise


def test_a_flat_reward_breaks_its_promise() -> None:
    flat = _leg(learns=False, versions=VERSIONS)
    assert any("reward rises" in promise for promise in _broken(synced=flat))


def test_a_reward_that_rises_without_syncs_breaks_the_check_of_the_check() -> None:
    (promise,) = _broken(unsynced=_leg(learns=True, versions=UNSYNCED))
    assert "check can fail" in promise


@pytest.mark.parametrize("difference", [2e-3, float("nan")])
def test_log_probabilities_of_other_weights_break_their_promise(difference: float) -> None:
    leg = _leg(learns=True, versions=VERSIONS)
    leg.lines[4]["carried"] = {"logprobMaxDiff": difference, "crossing": 1}
    (promise,) = _broken(synced=leg)
    assert "log-probabilities" in promise


@pytest.mark.parametrize("books", [{"failed": 1}, {"inFlight": 1}, {"sent": 0}])
def test_a_failed_or_lost_request_breaks_its_promise(books: dict[str, int]) -> None:
    leg = _leg(learns=True, versions=VERSIONS)
    leg.books |= books
    (promise,) = _broken(synced=leg)
    assert "no request failed" in promise


@pytest.mark.parametrize("label", ["default", "99"])
def test_an_answer_from_an_uncommitted_version_breaks_its_promise(label: str) -> None:
    leg = _leg(learns=True, versions=VERSIONS)
    leg.books["versions"] = {"-1": 4, label: 1}
    (promise,) = _broken(synced=leg)
    assert "never committed" in promise


@pytest.mark.parametrize(
    "proof",
    [
        Proof({"engines-0": "abc", "engines-1": "other"}, "abc"),
        Proof({"engines-0": "abc", "engines-1": None}, "abc"),
        Proof({"engines-0": "abc"}, None),
        Proof({}, "abc"),
    ],
)
def test_a_checksum_that_differs_breaks_its_promise(proof: Proof) -> None:
    (promise,) = _broken(proof=proof)
    assert "weights proven" in promise
