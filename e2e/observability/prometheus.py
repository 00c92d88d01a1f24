"""A Prometheus of one test: it scrapes what the test names, every second, and evaluates rules as often."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from e2e.observability.programs import ensure
from e2e.scenarios.kit import free_port, http, wait_until


class Prometheus:
    """One server; use as a context manager."""

    def __init__(
        self, folder: Path, targets: Mapping[str, Sequence[str]], rules: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._file = folder / "prometheus.yml"
        folder.mkdir(parents=True, exist_ok=True)
        if rules is not None:
            (folder / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
        self.scrape(targets, rules=rules is not None)

    def scrape(self, targets: Mapping[str, Sequence[str]], *, rules: bool) -> None:
        """Write the configuration: these targets by job."""
        self._file.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                    "rule_files": ["rules.yml"] if rules else [],
                    "scrape_configs": [
                        # As the chart's monitors: namespace and pool are those of our objects, not of the target.
                        {"job_name": job, "honor_labels": True, "static_configs": [{"targets": list(hosts)}]}
                        for job, hosts in targets.items()
                    ],
                }
            )
        )

    def __enter__(self) -> Prometheus:
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with (self.folder / "prometheus.log").open("ab") as out:
            self._process = subprocess.Popen(
                [
                    *prefix,
                    str(ensure()["prometheus"]),
                    f"--config.file={self._file}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_until(self._ready, "Prometheus to be ready", 60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None
        log = self.folder / "prometheus.log"
        assert self._process.poll() is None, f"Prometheus ended:\n{log.read_text()[-3000:]}"
        with contextlib.suppress(OSError):
            return http("GET", f"{self.url}/-/ready", timeout=2)[0] == 200
        return False

    def ask(self, path: str, **parameters: str) -> Any:
        """``data`` of an answer of the HTTP API; AssertionError when it is an error."""
        query = urllib.parse.urlencode(parameters)
        code, answer = http("GET", f"{self.url}/api/v1/{path}?{query}")
        assert code == 200, (parameters, answer)
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of a range query."""
        found: list[dict[str, Any]] = self.ask(
            "query_range", query=expression, start=str(start), end=str(end), step=str(step)
        )["result"]
        return found

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Labels of the alerts that fire, by name."""
        fired: dict[str, list[dict[str, str]]] = {}
        for alert in self.ask("alerts")["alerts"]:
            if alert["state"] == "firing":
                fired.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return fired


def scraped(address: str) -> str:
    """What a target shows now."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def lint(text: str) -> str:
    """What ``promtool check metrics`` says about a scrape; empty: nothing."""
    tool = str(ensure()["promtool"])
    done = subprocess.run(
        [tool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    said = (done.stdout + done.stderr).strip()
    return said or (f"promtool ended with {done.returncode}" if done.returncode else "")
