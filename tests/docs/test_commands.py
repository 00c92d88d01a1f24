"""Every command in README and docs is executed: the quickstart here, README's by e2e/scenarios and by this very run.

The quickstart runs in a copy of the checkout, because its cluster lives in the checkout's own .cluster folder, which
may be in use.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import ClusterError, LocalCluster
from e2e.node.images import name_of
from rlfleet.client import Client
from rlfleet.sender import WeightSender
from tests.chart.kit import chart, of_kind

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LANGUAGES = {"", "bash", "python"}
#: Blocks of README that are executed elsewhere: e2e/scenarios/test_demo.py, .ci/run, and whoever runs this test.
_README = ["make demo\n", "make demo SCENARIO=colocated\n", "make engines\n", "make test\n"]
#: Pages whose bash blocks are executed as they stand, and by what.
_EXECUTED = {
    "README.md": "tests/docs/test_commands.py",
    "quickstart.md": "tests/docs/test_commands.py",
    "install.md": "tests/chart/test_install.py",
    "adopt.md": "e2e/scenarios/adopting.py",
    "dynamo.md": "e2e/scenarios/test_dynamo.py",
    "security.md": "e2e/scenarios/test_key_rotation.py",
    "concepts.md": "e2e/scenarios/test_identity.py",
}
#: Blocks that need more than a test's cluster has, by how they begin: what does the same, with words that stand there.
#: Of these the test below checks what it can without: programs, files, flags and values.
_SHOWN = {
    "make image": ("e2e/node/conftest.py", "RealNode("),
    "helm install rlfleet charts/rlfleet": (
        "e2e/node/test_node.py",
        "test_the_quickstart_under_restricted_pod_security",
    ),
    "kind create cluster": ("docs/guides/real-node.md", "were not run where this project is tested"),
    "kubectl port-forward": ("tests/cli/test_reach.py", '"port-forward", "-n", "ops"'),
    "curl http://rlfleet-discovery": ("e2e/scenarios/test_discovery.py", "/v1/rl/workers"),
    "kubectl create token": ("e2e/scenarios/test_command_line.py", '"create", "token", name, "-n"'),
}
#: What a command begins with.
_COMMAND = re.compile(r"^(?:\$ )?(?:make|kubectl|helm|kind|docker|curl|pip|uv|rlfleet|export|python3?) ", re.MULTILINE)
_KEPT = {".git", ".venv", ".cluster", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis", ".pytest_cache"}


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return [body for found, body in _BLOCK.findall(path.read_text()) if found == language]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_command_hides_from_these_tests() -> None:
    for page in pages():
        languages = {language for language, _ in _BLOCK.findall(page.read_text())}
        assert languages <= _LANGUAGES, f"{page}: commands stand in bash blocks, which are executed"
        # The reference of the command line shows how commands are written, not what to type.
        if page.name != "cli.md":
            assert not [b for b in blocks(page, "") if _COMMAND.search(b)], f"{page}: a command in an unlabelled block"
        if page.parent.name == "runbooks":
            continue  # e2e/scenarios/test_observability.py executes them
        if page.name not in _EXECUTED or page.parent.name == "decisions":
            alone = [b for b in blocks(page, "bash") if not any(b.startswith(start) for start in _SHOWN)]
            assert not alone, f"{page}: nothing executes its commands"
    assert blocks(ROOT / "README.md", "bash") == _README


def test_whoever_is_said_to_run_a_command_does() -> None:
    for name, place in _EXECUTED.items():
        assert (ROOT / place).exists()
        assert name in (ROOT / place).read_text(), f"{place} does not read {name}"
    for start, (place, word) in _SHOWN.items():
        assert word in (ROOT / place).read_text(), f"{place} does not do what {start!r} does any more"
        assert any(b.startswith(start) for page in pages() for b in blocks(page, "bash")), f"{start!r} stands nowhere"


def test_commands_for_a_real_node_name_what_exists(tmp_path: Path) -> None:
    page = ROOT / "docs/guides/real-node.md"
    makefile = (ROOT / "Makefile").read_text()
    words = [
        w
        for b in blocks(page, "bash")
        for line in b.replace("\\\n", " ").splitlines()
        for w in [shlex.split(line, True)]
    ]
    for command in words:
        if command and command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command
        for flag, value in pairwise(command):
            if flag in ("-f", "--config"):
                assert (ROOT / value).is_file(), value
    (install,) = [c for c in words if c[:2] == ["helm", "install"]]
    given = [value for flag, value in pairwise(install) if flag == "--set"]
    assert len(given) == 3
    nested: dict[str, Any] = {}
    for one in given:
        path, _, value = one.partition("=")
        section, key = path.split(".")
        nested.setdefault(section, {})[key] = value
    (deployment,) = of_kind(chart(tmp_path, nested), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    # What `make node` has in its store.
    assert (container["image"], container["imagePullPolicy"]) == (name_of("operator"), "Never")


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in pages():
        for target in re.findall(r"`(?:KEEP=1 )?make ([a-z-]+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.relative_to(ROOT)} names make {target}"


def test_sdk_sample_calls_what_exists() -> None:
    (sample,) = blocks(ROOT / "docs/quickstart.md", "python")
    callables: dict[str, Callable[..., Any]] = {
        "Client": Client,
        "WeightSender": WeightSender,
        "client.sync": partial(Client.sync, None),
        "sender.publish": partial(WeightSender.publish, None),
    }
    checked = set()
    for call in (node for node in ast.walk(ast.parse(sample)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in callables:
            inspect.signature(callables[name]).bind(*call.args, **{str(k.arg): k.value for k in call.keywords})
            checked.add(name)
    assert checked == set(callables)
    for attribute in re.findall(r"\b(?:client|sender)\.(\w+)", sample):
        assert hasattr(Client, attribute) or hasattr(WeightSender, attribute) or attribute == "incarnation"


@pytest.mark.cluster
def test_the_trainer_role_allows_the_sdk_and_nothing_else(cluster: LocalCluster, namespace: str) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", str(ROOT / "docs/examples/trainer-rbac.yaml"))

    def may(verb: str, resource: str) -> bool:
        user = f"--as=system:serviceaccount:{namespace}:trainer"
        resource, _, part = resource.partition("/")
        try:
            return (
                cluster.kubectl("auth", "can-i", verb, resource, f"--subresource={part}", "-n", namespace, user).strip()
                == "yes"
            )
        except ClusterError:
            return False

    allowed = {
        "rlpipelines.rlfleet.dev": {"get", "list", "watch"},
        "syncrounds.rlfleet.dev": {"create", "get", "list", "watch"},
    }
    others = ["syncrounds.rlfleet.dev/status", "rlpipelines.rlfleet.dev/status", "enginepools.rlfleet.dev", "pods"]
    for resource in [*allowed, *others]:
        verbs = {v for v in ("get", "list", "watch", "create", "update", "patch", "delete") if may(v, resource)}
        assert verbs == allowed.get(resource, set()), resource


@pytest.mark.cluster
@pytest.mark.timeout(480)
def test_quickstart_works_as_written(tmp_path: Path) -> None:
    checkout = tmp_path / "rlfleet"
    # copy2 keeps the times: make must see that what is installed is up to date.
    shutil.copytree(ROOT, checkout, ignore=lambda folder, names: [n for n in names if n in _KEPT], symlinks=True)
    (checkout / ".venv").symlink_to(ROOT / ".venv")
    script = "set -euo pipefail\n" + "\n".join(blocks(ROOT / "docs/quickstart.md", "bash"))
    environment = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "PYTHONPATH", "MAKEFLAGS")}
    process = subprocess.Popen(
        ["bash", "-xc", script],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=420)
        assert process.returncode == 0, output[-8000:]
        assert not (checkout / ".cluster").exists(), "make cluster-down left files"
    finally:
        if (checkout / ".cluster").exists():
            print(_tail(checkout / ".cluster" / "operator.log"))
            subprocess.run(["make", "cluster-down"], cwd=checkout, env=environment, check=False, timeout=60)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _tail(path: Path) -> str:
    return path.read_text()[-4000:] if path.exists() else "(no operator.log)"
