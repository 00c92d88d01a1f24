"""Secrets do not leave with a support bundle, whatever they stand in; what support needs does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlfleet.cli.redaction import GONE, redacted, text
from tests.cli.fleets import recorded

SECRET = "Zx9planted4Q"
JWT = f"eyJhbGciOiJFZERTQSJ9.eyJ{SECRET}.c2ln{SECRET}"


def pod(**container: Any) -> dict[str, Any]:
    return {"metadata": {"name": "e-0", "annotations": {}}, "spec": {"containers": [{"name": "engine", **container}]}}


@pytest.mark.parametrize(
    "value",
    [
        pod(env=[{"name": "HF_TOKEN", "value": SECRET}]),
        pod(env=[{"name": "LOOKS_HARMLESS", "value": SECRET}]),
        pod(env=[{"name": "RLFLEET_ENGINE_ADMIN_KEY", "value": SECRET}]),
        pod(env=[{"name": "RLFLEET_ENGINE_URL", "value": f"http://me:{SECRET}@engine"}]),
        pod(args=["--api-key", SECRET, "--port", "1"]),
        pod(args=[f"--admin-api-key={SECRET}"]),
        pod(args=["--api-key", f"-{SECRET}"]),
        pod(command=["sh", "-c", f"export HF_TOKEN={SECRET}; python -m engine"]),
        pod(command=["sh", "-c", f"engine --api-key '{SECRET}'"]),
        pod(readinessProbe={"httpGet": {"httpHeaders": [{"name": "X-Api-Key", "value": SECRET}]}}),
        {"metadata": {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": f'{{"a":"{SECRET}"}}'}}},
        {"metadata": {"annotations": {"example.com/token": SECRET}}},
        {"metadata": {"managedFields": [{"x": SECRET}]}},
        {"spec": {"template": {"spec": {"containers": [{"env": [{"name": "A", "value": SECRET}]}]}}}},
        {"spec": {"url": f"https://user:{SECRET}@host/x"}},
        {"password": SECRET},
        {"adminKey": {"apiKey": SECRET}},
        {"message": f"call failed: Authorization: Bearer {JWT}"},
        {"message": f"token={SECRET}, next"},
        {"message": f'{{"api_key": "{SECRET}"}}'},
    ],
)
def test_a_planted_secret_is_gone_from_objects(value: dict[str, Any]) -> None:
    left = json.dumps(redacted(value))
    assert SECRET not in left
    assert left != "{}"


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {SECRET}",
        f"authorization: basic {SECRET}==",
        f"got {JWT} from it",
        f"url=postgres://u:{SECRET}@db/x",
        f"HF_TOKEN={SECRET}",
        f"started with --admin-api-key={SECRET} --x",
        f"started with --admin-api-key {SECRET} --x",
        f'{{"msg": "x", "api_key": "{SECRET}"}}',
        f"password: '{SECRET}'",
        f"hf_{SECRET}",
        f"sk-{SECRET}",
        f"-----BEGIN PRIVATE KEY-----\nMIIE{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN EC PRIVATE KEY-----\nMIIE{SECRET} and then the log was cut",
    ],
)
def test_a_planted_secret_is_gone_from_logs(line: str) -> None:
    assert SECRET not in text(f"before\n{line}\nafter")


def test_what_support_needs_stays() -> None:
    objects = recorded("failed")
    assert redacted(objects) == objects
    kept = pod(
        env=[
            {"name": "RLFLEET_ENGINE_INDEX", "value": "3"},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "engine", "key": "admin"}}},
        ],
        args=["--model", "m", "--tp", "2", "--port", "30000"],
    )
    assert redacted(kept) == kept
    line = '{"level": "INFO", "message": "phase Staging", "roundUID": "u", "generation": 1796010965000}'
    assert text(line) == line
    assert redacted(pod(env=[{"name": "A", "value": "x"}]))["spec"]["containers"][0]["env"] == [
        {"name": "A", "value": GONE}
    ]
