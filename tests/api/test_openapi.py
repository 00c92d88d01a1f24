"""The OpenAPI documents: valid, complete, and about what the servers really have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from openapi_spec_validator import validate

from e2e.reference import __main__ as command
from rlfleet.api import openapi, wire
from rlfleet.api.tokens import Scope
from rlfleet.discovery.server import DiscoveryServer
from rlfleet.gate.server import GateServer
from rlfleet.sender.server import Server

#: Routes are bound methods of the server; none is called here, so the servers need nothing to serve.
SERVERS: dict[str, Any] = {"gate": GateServer, "sender": Server, "discovery": DiscoveryServer}
CALLS = {"gate": openapi.GATE, "sender": openapi.SENDER, "discovery": openapi.DISCOVERY}
both = pytest.mark.parametrize("name", SERVERS)


def routes(app: web.Application) -> set[tuple[str, str]]:
    found = {(route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource}
    return {(method, path) for method, path in found if method != "head"}


@both
def test_what_is_described_is_what_the_server_has(name: str) -> None:
    server = object.__new__(SERVERS[name])
    assert {(c.method, c.path) for c in CALLS[name]} == routes(server.application())


@both
def test_the_document_is_valid_openapi(name: str) -> None:
    validate(openapi.document(name, CALLS[name]))


@both
def test_every_call_without_a_token_is_a_probe(name: str) -> None:
    known = {scope.value for scope in Scope}
    for call in CALLS[name]:
        assert set(call.scopes) <= known
        assert bool(call.scopes) == (call.path.startswith("/v1/") and not call.readers_token)


def test_bodies_are_the_models_that_are_parsed() -> None:
    schemas = openapi.document("gate", openapi.GATE)["components"]["schemas"]
    sent = schemas["EnrollRequest"]
    assert sent["additionalProperties"] is False
    assert {"podUid", "engineUrl"} <= set(sent["properties"])
    assert schemas["ErrorReason"]["enum"] == [reason.value for reason in wire.ErrorReason]


def test_committed_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_file_is_named_and_written(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs/reference").mkdir(parents=True)
    assert command.main(["--check", "--root", str(tmp_path)]) == 1
    assert "docs/reference/settings.md" in capsys.readouterr().out
    assert command.main(["--write", "--root", str(tmp_path)]) == 0
    assert command.main(["--check", "--root", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "docs/reference/gate.openapi.json").read_text())["openapi"] == "3.1.0"
