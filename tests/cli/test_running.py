"""The command as a process: exit codes, pipes, terminals, watching, being interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.cli.fleets import recorded
from tests.web.apiserver import Apiserver

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "t-8dbb0a5ba5"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
#: Seconds for a command; they only end a broken test.
PATIENCE = 120.0


@pytest.fixture
async def apiserver() -> AsyncIterator[Apiserver]:
    """Answers with the failed fleet."""
    one = Apiserver(recorded("failed"))
    await one.server.start_server()
    yield one
    await one.server.close()


@pytest.fixture
def kubeconfig(apiserver: Apiserver, tmp_path: Path) -> Path:
    """Contexts for each of the tokens; the namespace stands in them."""
    names = ("all", "one", "none", "forged")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "all",
        "clusters": [{"name": "c", "cluster": {"server": str(apiserver.server.make_url("")).rstrip("/")}}],
        "users": [{"name": n, "user": {"token": n}} for n in names],
        "contexts": [{"name": n, "context": {"cluster": "c", "user": n, "namespace": NAMESPACE}} for n in names],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def point(kubeconfig: Path, old: TestServer, new: TestServer) -> None:
    """The kubeconfig names another server."""
    kubeconfig.write_text(kubeconfig.read_text().replace(str(old.make_url("")), str(new.make_url(""))))


def environment(kubeconfig: Path, **more: str) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "KUBERNETES_SERVICE_HOST")}
    paths = {"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "KUBECONFIG": str(kubeconfig)}
    return {**known, **paths, "TERM": "xterm-256color", **more}


async def start(kubeconfig: Path, *words: str, **how: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rlfleet.app.cli",
        *words,
        env=environment(kubeconfig, **how.pop("env", {})),
        stdout=how.pop("stdout", asyncio.subprocess.PIPE),
        stderr=how.pop("stderr", asyncio.subprocess.PIPE),
        **how,
    )


async def run(kubeconfig: Path, *words: str) -> tuple[int, str, str]:
    process = await start(kubeconfig, *words)
    async with asyncio.timeout(PATIENCE):
        out, err = await process.communicate()
    assert b"Traceback" not in err, err.decode()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def on_terminal(kubeconfig: Path, *words: str, **env: str) -> str:
    """What the command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = await start(kubeconfig, *words, stdout=theirs, stderr=theirs, env={"COLUMNS": "80", **env})
    os.close(theirs)
    seen = b""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                chunk = os.read(ours, 65536)
            except BlockingIOError:
                await asyncio.sleep(0.02)
                continue
            except OSError:  # the other end is closed: the command has ended
                break
            if not chunk:
                break
            seen += chunk
        await process.wait()
    os.close(ours)
    assert process.returncode == 0, seen
    return seen.decode()


async def test_in_a_pipe_it_is_plain_whole_and_without_trailing_blanks(kubeconfig: Path) -> None:
    code, out, err = await run(kubeconfig, "status")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert any(len(line) > 80 for line in out.splitlines())
    assert not any(line.endswith(" ") for line in out.splitlines())
    # One line each, so that it can be searched.
    assert "StagingDeadline: round p-v2-4afbc6dae8 failed in Staging: 4 of 4 gates did not receive the weights" in out


async def test_on_a_terminal_it_has_colour_and_80_columns_unless_it_is_told_not_to(kubeconfig: Path) -> None:
    for words in (("status",), ("rounds",)):
        text = await on_terminal(kubeconfig, *words)
        assert COLOUR.search(text)
        assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= 80 for line in text.splitlines())
        assert not COLOUR.search(await on_terminal(kubeconfig, *words, NO_COLOR="1"))


def lease(at: datetime) -> list[dict[str, Any]]:
    """The operator's Lease, renewed then."""
    spec = {
        "holderIdentity": "rlfleet-0_uid_nonce",
        "leaseDurationSeconds": 15,
        "renewTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    return [{"metadata": {"name": "rlfleet-operator"}, "spec": spec}]


async def test_a_status_that_nobody_keeps_up_to_date_says_so_first(kubeconfig: Path, apiserver: Apiserver) -> None:
    async def said(*words: str) -> tuple[str, str]:
        _, table, _ = await run(kubeconfig, "status", *words)
        _, text, _ = await run(kubeconfig, "status", "-o", "json", *words)
        assert json.loads(text)["pipelines"]
        return table.splitlines()[0], json.loads(text)["operator"]["level"]

    now = datetime.now(UTC)
    apiserver.date = format_datetime(now, usegmt=True)
    apiserver.objects["leases"] = lease(now)
    assert await said() == ("t-8dbb0a5ba5/p  Readiness unknown (GatesUnreachable)", "Ok")
    before = now - timedelta(minutes=10, seconds=20)
    apiserver.objects["leases"] = lease(before)
    first, level = await said()
    assert first.startswith("! nobody keeps this up to date: the Lease of rlfleet-0_uid_nonce was renewed 10m ago")
    assert level == "Failed"
    # The clock that counts is the apiserver's: this machine's may be wrong.
    apiserver.date = format_datetime(before, usegmt=True)
    assert (await said())[1] == "Ok"
    # Not known is not well.
    first, level = await said("--context", "one")
    assert first.startswith("! operator: whether one leads is not known: ")
    assert level == "Unknown"
    apiserver.objects["leases"] = []
    first, level = await said()
    assert first.startswith("! operator: there is no Lease rlfleet-operator in namespace rlfleet-system")
    assert "--operator-namespace" in first
    assert level == "Unknown"


async def test_documents_are_alone_on_standard_output(kubeconfig: Path) -> None:
    _, out, err = await run(kubeconfig, "status", "-o", "json")
    assert json.loads(out)["pipelines"][0]["name"] == "p"
    assert err == ""
    _, out, _ = await run(kubeconfig, "rounds", "-o", "yaml", "--limit", "1")
    assert [r["name"] for r in yaml.safe_load(out)["rounds"]] == ["p-v2-4afbc6dae8"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("status", "--context", "forged"), 4, "does not accept these credentials"),
        (("status", "--context", "none"), 4, "Ask for a Role that allows it"),
        (("status", "-A", "--context", "one"), 4, "is forbidden"),
        (("status", "--context", "nowhere"), 5, "--context"),
        (("status", "nope"), 3, "not found"),
        (("status", "--colour"), 2, "No such option"),
        (("status", "-o", "xml"), 2, "xml"),
        (("frobnicate",), 2, "No such command"),
        (("explain", "p", "--operator", "http://127.0.0.1:1"), 5, "--web-bind"),
    ],
)
async def test_every_failure_has_its_code_and_says_what_to_do(
    kubeconfig: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    found, out, err = await run(kubeconfig, *words)
    assert (found, out) == (code, "")
    assert says in " ".join(err.split())


async def test_an_apiserver_that_is_away_is_named(kubeconfig: Path, apiserver: Apiserver) -> None:
    await apiserver.server.close()
    code, _, err = await run(kubeconfig, "status")
    assert code == 5
    assert "does not answer" in err
    assert str(kubeconfig) in err


async def test_what_is_no_apiserver_is_said(kubeconfig: Path, apiserver: Apiserver) -> None:
    """Something else listens there: a proxy's page of login, for instance."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>log in</html>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    async with TestServer(app) as other:
        point(kubeconfig, apiserver.server, other)
        code, out, err = await run(kubeconfig, "status")
    assert (code, out) == (5, "")
    assert "does not answer as an apiserver does" in err


async def test_a_watch_in_a_pipe_writes_one_block_for_each_change_and_ends_when_interrupted(
    kubeconfig: Path, apiserver: Apiserver
) -> None:
    apiserver.objects = recorded("staging")
    process = await start(kubeconfig, "status", "--watch", "--interval", "0.2")
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE):
            seen = ""
            while "f-1-a74eb" not in seen:
                seen += (await process.stdout.readline()).decode()
            assert "now: Refresh p-v2-4afbc6dae8" in seen
            apiserver.objects = recorded("failed")
            while "f-1-a74eb" not in seen.partition("now: nothing")[2]:
                seen += (await process.stdout.readline()).decode()
            # The picture before was drawn once, however often it was looked at.
            assert seen.count("now: ") == 2
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 130
    assert err == b""


#: A Ctrl-C that comes while a finalizer runs, during the first look.
_DROPPED = """
import os, signal, sys
from rlfleet.cli import app
from rlfleet.cli.cluster import Cluster

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(1 for _ in range(1000))

def look(self, *args, **kwargs):
    Cluster.list = before
    Finalized()
    print("went on", file=sys.stderr, flush=True)
    return before(self, *args, **kwargs)

before, Cluster.list = Cluster.list, look
sys.exit(app.run(["status", "--watch", "--interval", "0.2"]))
"""


async def test_a_watch_ends_though_python_drops_the_interrupt(kubeconfig: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _DROPPED),
        env=environment(kubeconfig),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert b"went on" in err, "the interrupt was dropped"
    assert process.returncode == 130


async def test_a_reader_that_has_seen_enough_is_no_failure(kubeconfig: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = await start(kubeconfig, "status", stdout=write)
    os.close(write)
    async with asyncio.timeout(PATIENCE):
        _, err = await process.communicate()
    assert process.returncode == 0
    assert err == b""


async def test_completion_offers_commands_options_and_names_of_objects(kubeconfig: Path) -> None:
    async def complete(*words: str) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from rlfleet.cli.completing import kubectl_complete; raise SystemExit(kubectl_complete())",
            *words,
            env=environment(kubeconfig),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode().split()

    assert await complete("ro") == ["rounds", "round", ":4"]
    assert "--all-namespaces" in await complete("status", "--")
    assert await complete("round", "show", "p-v") == [
        "p-v1-0028ca96bc", "p-v2-4afbc6dae8", "p-vbase-866d829f36", ":4"
    ]  # fmt: skip
    assert await complete("round", "show", "--context", "forged", "p-v") == [":4"]
