"""What clients that were written for Dynamo make of our list: their checks, replayed in words of our own.

They install only with a trainer (torch, GPUs), so each check names the file that it follows. All end in one of two
ways: the client reads the list, or it waits for a capability that is not advertised. None goes on to order anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlfleet.discovery.board import Answer
from rlfleet.discovery.probing import Entry
from rlfleet.plan.discovery import Naming, described, failed
from tests.plan.rounds_kit import DIGEST_A, gate
from tests.plan.test_discovery import worker

MODEL = "Qwen/Qwen3-0.6B"
NAMING = Naming()
ROUTES = {
    "init_weights_update_group",
    "pause_generation",
    "resume_generation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
}


class Pending(Exception):
    """The client waits and asks again."""


def body(*, is_strict: bool = False, bad: bool = False) -> Any:
    """A list of two workers, of which one may not have answered."""
    status = gate(holds=(3, DIGEST_A))
    status = status.model_copy(update={"engine": status.engine.model_copy(update={"model": MODEL, "world_size": 2})})
    entries = [described(worker("e-0"), status, NAMING)]
    other = worker("e-1", model=MODEL)
    entries.append(failed(other, "no answer", NAMING) if bad else described(other, status, NAMING))
    return json.loads(Answer(NAMING, tuple(Entry(e) for e in entries)).body(is_strict=is_strict))


def prime_rl(payload: Any) -> str:
    """PrimeIntellect-ai/prime-rl, src/prime_rl/inference/dynamo.py, 02e7f45f: what it would drive, and how."""

    class Worker(BaseModel):
        admin_base_url: str
        instance_id: int = Field(ge=0, strict=True)

    assert payload.get("protocol_version") in (None, 1)
    found = []
    for w in payload["workers"]:
        if w.get("model") != MODEL:
            continue
        if w.get("error") is not None:
            raise Pending("a worker is not ready")
        url = w.get("admin_base_url")
        if url is None and (url := w.get("system_url")) is not None and not set(w["routes"]) >= ROUTES:
            raise Pending("routes are not advertised")
        found.append(Worker.model_validate({**w, "admin_base_url": url}))
    if not found:
        raise Pending("no worker")
    return found[0].admin_base_url


def prime_rl_that_forbids(payload: Any) -> list[Any]:
    """An earlier revision of the same file: members that it does not know are refused, all that it knows are needed."""

    class Worker(BaseModel):
        model_config = ConfigDict(extra="forbid")

        namespace: str = Field(min_length=1)
        component: str = Field(min_length=1)
        endpoint: str = Field(min_length=1)
        instance_id: int = Field(ge=0, strict=True)
        transport: str | dict[str, str]
        request_plane_url: str = Field(min_length=1)
        system_url: str = Field(min_length=1)
        admin_base_url: str | None = Field(default=None, min_length=1)
        world_size: int = Field(gt=0, strict=True)
        model: str = Field(min_length=1)
        routes: tuple[str, ...]
        error: str | None = None

    class Snapshot(BaseModel):
        model_config = ConfigDict(extra="forbid")

        protocol_version: int = Field(strict=True, ge=1, le=1)
        namespace: str = Field(min_length=1)
        workers: tuple[dict[str, Any], ...]

    found = []
    for w in Snapshot.model_validate(payload).workers:
        if w.get("error"):
            raise Pending("a worker is not ready")
        one = Worker.model_validate(w)
        assert not isinstance(one.transport, dict) or [bool(k and v) for k, v in one.transport.items()] == [True]
        found.append(one)
    assert len({w.instance_id for w in found}) == len(found)
    if any(w.admin_base_url is None for w in found):
        raise Pending("admin_base_url is missing")
    return found


def prime_rl_with_routes(payload: Any) -> list[str]:
    """src/prime_rl/inference/dynamo_admin.py in pull request 2964: system URLs of workers that have all routes."""
    for w in payload["workers"]:
        if w.get("error") or not w.get("system_url") or w.get("model") not in (None, MODEL):
            raise Pending(str(w.get("error")))
        if missing := ROUTES - set(w.get("routes", [])):
            raise Pending(f"missing RL routes: {sorted(missing)}")
    return [w["system_url"] for w in payload["workers"]]


def modelexpress(payload: Any) -> list[str]:
    """ai-dynamo/modelexpress, examples/rl/dynamo_vllm_refit: every worker with a system_url, whatever its routes."""
    found = [w["system_url"] for w in payload["workers"] if w.get("system_url")]
    if not found:
        raise Pending("no worker")
    return found


Client = Callable[[Any], Any]


@pytest.mark.parametrize("client", [prime_rl, prime_rl_that_forbids, prime_rl_with_routes])
def test_a_client_that_checks_capabilities_reads_the_list_and_drives_nobody(client: Client) -> None:
    with pytest.raises(Pending, match=r"routes|admin_base_url"):
        client(body(is_strict=True))


@pytest.mark.parametrize("client", [prime_rl, prime_rl_with_routes])
def test_members_of_ours_are_passed_over(client: Client) -> None:
    with pytest.raises(Pending, match="routes"):
        client(body())


def test_a_client_that_forbids_other_members_needs_the_strict_list() -> None:
    with pytest.raises(ValidationError, match="rlfleet"):
        prime_rl_that_forbids(body())


@pytest.mark.parametrize("client", [prime_rl, prime_rl_that_forbids, prime_rl_with_routes])
def test_a_worker_that_did_not_answer_is_one_to_wait_for(client: Client) -> None:
    payload = body(is_strict=True, bad=True)
    payload["workers"] = [w for w in payload["workers"] if "error" in w]
    with pytest.raises(Pending, match=r"not ready|no answer"):
        client(payload)


def test_a_client_that_checks_nothing_meets_gates_only() -> None:
    # A gate has no path below /engine/: such a client gets 404 from the first one and stops.
    assert sorted(modelexpress(body())) == ["http://e-0:9440", "http://e-1:9440"]
    assert modelexpress(body(bad=True)) == ["http://e-0:9440"]
