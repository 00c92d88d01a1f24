"""The HTTP interfaces of gate, sender and worker discovery as OpenAPI 3.1, made from the models that are on the wire.

Invariant: a path is described here if and only if its server has it (a test compares both ways), and bodies are the
wire models themselves, so a document cannot promise a field that the server refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rlfleet import __version__
from rlfleet.api import wire
from rlfleet.api.discovery import RLWorkers
from rlfleet.api.manifest import Manifest

_REF: Final = "#/components/schemas/{model}"
_READ: Final = ("read", "control")
_CONTROL: Final = ("control",)
_PUSH: Final = ("push",)
#: What a token is where the operator calls.
SIGNED: Final = "Signed by the operator (EdDSA); audience: the pod's UID. Scopes are claims of it."
#: What it is where others call the operator.
READERS: Final = "The reader's own, of a ServiceAccount that may read what is listed; with --discovery-auth=token."


@dataclass(frozen=True, slots=True)
class Call:
    """One method of one path. ``scopes``: of the token, any of them; none: no token. ``readers_token``: whether one is
    needed is a setting, and it is the reader's own.

    ``body``: model of the JSON body, ``bytes`` for a raw one. ``answers``: status code -> model, ``str`` for text, or
    None for a JSON object without a model.
    """

    method: str
    path: str
    summary: str
    answers: dict[int, type[BaseModel] | type[str] | None]
    scopes: tuple[str, ...] = ()
    body: type[BaseModel] | type[bytes] | None = None
    query: dict[str, str] | None = None
    readers_token: bool = False


_WAIT: Final = {"waitSeconds": f"Answer after the operation's end or so many seconds (0 to {wire.MAX_WAIT_SECONDS:g})."}
_PROBES: Final = (
    Call("get", "/livez", "The process answers.", {200: None}),
    Call("get", "/metrics", "Metrics in Prometheus' text format.", {200: str}),
)

GATE: Final[Sequence[Call]] = (
    *_PROBES,
    Call("get", "/startupz", "The start-up promise holds: the engine container may start.", {200: None}),
    Call(
        "get",
        "/enginez",
        "Liveness of the engine's container: its loop answers, or an operation of the gate may keep it busy.",
        {200: None, 503: wire.ErrorBody},
    ),
    Call("get", "/readyz", "The engine answers with a model; a paused engine is ready.", {200: None}),
    Call("get", "/v1/status", "What the gate knows, read now.", {200: wire.GateStatus}, _READ),
    Call(
        "post",
        "/v1/enroll",
        "Tell the gate its pipeline, its routers and the keys that count.",
        {200: wire.GateStatus},
        _CONTROL,
        wire.EnrollRequest,
    ),
    Call("post", "/v1/fence", "Store a fence.", {200: wire.GateStatus}, _CONTROL, wire.FenceRequest),
    Call(
        "post",
        "/v1/operations",
        "Start an operation (202), or read the one with this id (200).",
        {202: wire.OperationRecord, 200: wire.OperationRecord},
        _CONTROL,
        wire.OperationRequest,
    ),
    Call(
        "get",
        "/v1/operations/{id}",
        "An operation's record.",
        {200: wire.OperationRecord},
        _READ,
        query=_WAIT,
    ),
    Call(
        "put",
        "/v1/staging/{operation}/manifest",
        "Stage the manifest.",
        {200: wire.StagedReport},
        _PUSH,
        Manifest,
    ),
    Call(
        "put",
        "/v1/staging/{operation}/buckets/{index}",
        "Stage one bucket: the bytes of its tensors, in the manifest's order, with Content-Length.",
        {200: wire.StagedReport},
        _PUSH,
        bytes,
    ),
)

SENDER: Final[Sequence[Call]] = (
    *_PROBES,
    Call("get", "/v1/status", "What the sender holds.", {200: wire.SenderStatus}, _READ),
    Call("get", "/v1/manifest/{digest}", "The manifest with this digest.", {200: Manifest}, _READ),
    Call("get", "/v1/operations/{id}", "An operation's record.", {200: wire.OperationRecord}, _READ, query=_WAIT),
    Call("post", "/v1/fence", "Store a fence.", {200: wire.SenderStatus}, _CONTROL, wire.FenceRequest),
    Call(
        "post", "/v1/hold", "Keep one version for an operation.", {200: wire.SenderStatus}, _CONTROL, wire.HoldRequest
    ),
    Call("post", "/v1/release", "End a hold.", {200: wire.SenderStatus}, _CONTROL, wire.ReleaseRequest),
    Call(
        "post",
        "/v1/operations",
        "Start a push or a broadcast (202), or read the one with this id (200).",
        {202: wire.OperationRecord, 200: wire.OperationRecord},
        _CONTROL,
        wire.SenderOperationRequest,
    ),
)


_SCOPES: Final = {
    "": "of all namespaces that are served",
    "/namespaces/{namespace}": "of one Kubernetes namespace",
    "/namespaces/{namespace}/pipelines/{pipeline}": "of one RLPipeline",
}
DISCOVERY: Final[Sequence[Call]] = tuple(
    Call("get", f"{before}{path}/v1/rl/workers", f"The live workers {of}{more}.", {200: RLWorkers}, readers_token=True)
    for before, more in (("", ""), ("/strict", ", in Dynamo's members alone"))
    for path, of in _SCOPES.items()
)


def document(
    title: str, calls: Sequence[Call], *, problem: type[BaseModel] = wire.ErrorBody, token: str = SIGNED
) -> dict[str, Any]:
    """An OpenAPI document of these calls. ``problem``: every answer outside 2xx; ``token``: whose it is, and when."""
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method] = _operation(call, problem)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": __version__,
            "summary": f"Protocol version {wire.PROTOCOL_VERSION}. Generated from operator/rlfleet/api.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": token,
                }
            },
            "schemas": _schemas(calls, problem),
        },
    }


def _operation(call: Call, problem: type[BaseModel]) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": call.summary, "operationId": _id(call)}
    names = [part[1:-1] for part in call.path.split("/") if part.startswith("{")]
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    parameters += [
        {"name": n, "in": "query", "description": text, "schema": {"type": "number", "minimum": 0}}
        for n, text in (call.query or {}).items()
    ]
    if parameters:
        made["parameters"] = parameters
    if call.scopes:
        made["security"] = [{"token": []}]
        made["description"] = "Scope of the token: " + " or ".join(f"`{s}`" for s in call.scopes) + "."
    if call.readers_token:
        made["security"] = [{}, {"token": []}]
    if call.body is bytes:
        made["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    elif call.body is not None:
        made["requestBody"] = {"required": True, "content": _json(call.body)}
    made["responses"] = {
        **{str(code): {"description": call.summary, "content": _json(answer)} for code, answer in call.answers.items()},
        "default": {"description": "Refused, or failed: why, and what to do.", "content": _json(problem)},
    }
    return made


def _id(call: Call) -> str:
    words = [part.strip("{}") for part in call.path.split("/") if part and part != "v1"]
    return call.method + "".join(word.capitalize() for word in words)


def _json(model: Any) -> dict[str, Any]:
    if model is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    if model is None:
        return {"application/json": {"schema": {"type": "object"}}}
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _schemas(calls: Sequence[Call], problem: type[BaseModel]) -> dict[str, Any]:
    """Requests as they are parsed, answers as they are written."""
    parsed = {c.body for c in calls if c.body is not None and c.body is not bytes}
    written = {a for c in calls for a in c.answers.values() if a is not None and a is not str} | {problem}
    wanted: Iterable[tuple[Any, Any]] = [
        *((m, "validation") for m in sorted(parsed, key=lambda m: m.__name__)),
        *((m, "serialization") for m in sorted(written - parsed, key=lambda m: m.__name__)),
    ]
    _, made = models_json_schema(list(wanted), by_alias=True, ref_template=_REF)
    return dict(sorted(made["$defs"].items()))
