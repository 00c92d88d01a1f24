"""The command line and the settings: what is refused, and what is not even imported."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlfleet import __version__
from rlfleet.app import settings
from rlfleet.app.cli import main
from rlfleet.plan.discovery import Naming
from rlfleet.plan.leader import Timing

ROOT = Path(__file__).resolve().parents[2]


def loaded(*flags: str, **environ: str) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(flags), environ)


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    assert loaded().poll_seconds == 5
    assert loaded(RLFLEET_POLL_SECONDS="3").poll_seconds == 3
    assert loaded("--poll-seconds", "2", RLFLEET_POLL_SECONDS="3").poll_seconds == 2
    assert loaded("--concurrency", "7").concurrency == 7
    control = loaded("--namespace", "ops", "--identity", "me").control()
    assert control.namespace == "ops"
    assert control.identity.startswith("me_")


def test_two_processes_on_one_host_have_different_names() -> None:
    assert loaded().control().identity != loaded().control().identity


def test_a_process_is_named_by_its_pod_and_fits_into_status(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RLFLEET_POD_NAME": "p" * 253, "RLFLEET_POD_UID": "8d1f0d6e-30ad-4a3f-8d0e-8a4f7f1f6b3c"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    identity = loaded().control().identity
    assert identity.startswith("ppp")
    assert env["RLFLEET_POD_UID"] in identity
    assert len(identity) <= 128
    assert loaded().control().identity != identity


def test_switches_and_lists() -> None:
    assert loaded().leader_elect
    assert loaded("--leader-elect").leader_elect
    assert not loaded("--leader-elect=false").leader_elect
    assert not loaded(RLFLEET_LEADER_ELECT="False").leader_elect
    assert loaded().watch_namespaces == ()
    assert loaded("--watch-namespaces", "a,b", "--watch-namespaces=c, a").watch_namespaces == ("a", "b", "c")
    assert loaded(RLFLEET_WATCH_NAMESPACES="a,b").watch_namespaces == ("a", "b")
    assert loaded("--watch-namespaces=c", RLFLEET_WATCH_NAMESPACES="a,b").watch_namespaces == ("c",)
    lease = ("--lease-seconds=5", "--lease-renew-seconds=3", "--lease-retry-seconds=0.5")
    assert loaded(*lease).timing() == Timing(5, 3, 0.5)


def test_dynamos_variables_are_read_as_dynamo_reads_them(caplog: pytest.LogCaptureFixture) -> None:
    chosen = loaded(
        DYN_ENABLE_RL="1", DYN_RL_PORT="9001", DYN_NAMESPACE="prod", DYN_RL_ENDPOINT="admin",
        DYN_RL_COMPONENTS=" a, ,b ", DYN_RL_COMPONENT="c", DYN_RL_REQUEST_TIMEOUT_SECS="7",
        DYN_RL_MAX_CONCURRENT_PROBES="3",
    )  # fmt: skip
    assert (chosen.discovery, chosen.discovery_port, chosen.discovery_request_timeout_seconds) == (True, 9001, 7)
    assert chosen.discovery_naming() == Naming("prod", "admin", frozenset({"a", "b"}))
    assert chosen.discovery_max_concurrent_probes == 3
    assert loaded(DYN_RL_COMPONENTS=" , ", DYN_RL_COMPONENT="c").discovery_components == ("c",)
    assert loaded("--discovery-components=x", DYN_RL_COMPONENTS="a").discovery_components == ("x",)
    assert not caplog.records
    unusable = {
        "DYN_ENABLE_RL": "maybe", "DYN_RL_PORT": "70000", "DYN_NAMESPACE": "a.b", "DYN_RL_ENDPOINT": "",
        "DYN_RL_REQUEST_TIMEOUT_SECS": "soon", "DYN_RL_MAX_CONCURRENT_PROBES": "0",
    }  # fmt: skip
    assert loaded(**unusable) == loaded()
    assert {r.args[0] for r in caplog.records if isinstance(r.args, tuple)} == unusable.keys()
    assert not loaded().discovery


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--discovery-port", "70000"), r"--discovery-port \(DYN_RL_PORT\): 70000 can not be used"),
        (("--discovery-max-concurrent-probes", "0"), "0 can not be used: workers asked at the same time"),
        (("--discovery-request-timeout-seconds", "soon"), "'soon' is no int"),
        (("--discovery-namespace", "a.b"), "'a.b' can not be used"),
        (("--discovery-auth", "tokn"), "must be none or token"),
        (("--api-qps", "0"), r"--api-qps \(RLFLEET_API_QPS\) must be at least"),
        (("--concurrency", "many"), "'many' is no int"),
        (("--log-format", "xml"), "must be json or text"),
        (("--log-level", "LOUD"), "must be DEBUG"),
        (("--health-bind", "nowhere"), "must be address:port"),
        (("--leader-elect", "maybe"), "'maybe' is no bool"),
        (("--lease-renew-seconds", "15"), r"must be below --lease-renew-seconds .* and that below --lease-seconds"),
        (("--lease-retry-seconds", "10"), r"--lease-retry-seconds \(RLFLEET_LEASE_RETRY_SECONDS\) must be below"),
        (("--lease-seconds", "3601"), "must be at most 3600"),
        (("--lease-name", ""), "must not be empty"),
        (("--watch-namespaces", "a,B_c"), "'B_c' is no namespace's name"),
        (("--peer-proxy", "proxy:3128"), r"--peer-proxy \(RLFLEET_PEER_PROXY\) must be an http:// URL"),
        (("--tls-secret", "certs"), r"--tls-secret \(RLFLEET_TLS_SECRET\) and --peer-ca-file .* go together"),
        (("--peer-ca-file", "ca.crt"), "go together"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(settings.SettingsError, match=message):
        loaded(*flags)
    assert main(["operator", *flags]) == 2
    assert "rlfleet operator:" in capsys.readouterr().err


def test_a_file_of_authorities_that_is_not_there_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["operator", "--tls-secret", "certs", "--peer-ca-file", str(tmp_path / "nothing.crt")]) == 2
    said = capsys.readouterr().err
    assert "--peer-ca-file (RLFLEET_PEER_CA_FILE)" in said
    assert "nothing.crt" in said


def test_version_and_crds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main(["crds"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("kind: CustomResourceDefinition") == 4
    assert main(["crds", "--output", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.yaml"))) == 4
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (ROOT / "crds" / file.name).read_bytes()


def test_gate_command_loads_no_operator_code() -> None:
    code = (
        "import sys\n"
        "from rlfleet.app import cli\n"
        "assert cli.main(['gate']) == 2, 'a gate without its environment must refuse'\n"
        "found = {m for m in sys.modules if m.split('.')[0] in ('kopf', 'kubernetes')\n"
        "         or m.startswith(('rlfleet.control', 'rlfleet.kube', 'rlfleet.app.operator'))}\n"
        "assert not found, found\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLFLEET_")}
    env["PYTHONPATH"] = f"{ROOT / 'operator'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("missing", "words", "code", "says"),
    [("typer", ["status"], 2, "pip install 'rlfleet[cli]'"), ("typer", ["version"], 0, ""), ("kopf", ["-h"], 0, "")],
)
def test_the_extra_is_asked_for_where_it_is_needed_only(missing: str, words: list[str], code: int, says: str) -> None:
    program = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from rlfleet.app import cli\n"
        f"code = cli.main({words!r})\n"
        "assert not {m for m in sys.modules if m.startswith(('rlfleet.control', 'rlfleet.kube'))}\n"
        "raise SystemExit(code)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_address_for_probes_ends_the_operator_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "rlfleet.app.cli", "operator", f"--health-bind={bind}", "--log-format=text"],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "--health-bind" in output
    assert "in use" in output
    assert "Traceback" not in output


def test_a_taken_address_for_worker_discovery_ends_the_operator_too(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = "http://127.0.0.1:1"  # where no apiserver is
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "users": [{"name": "u", "user": {"token": "t"}}],
                    "clusters": [{"name": "c", "cluster": {"server": server}}], "current-context": "x",
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )  # fmt: skip
        flags = ("--discovery", f"--discovery-port={taken.getsockname()[1]}", f"--kubeconfig={kubeconfig}")
        more = ("--health-bind=127.0.0.1:0", "--web-bind=", "--log-format=text", "--leader-elect=false")
        done = subprocess.run(
            [sys.executable, "-m", "rlfleet.app.cli", "operator", *flags, *more],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "--discovery-port" in output
    assert "in use" in output
