"""ASGI middleware that leaves the engine's control paths to whoever knows this engine's key: its gate.

vLLM's own ``--api-key`` guards nothing but the paths of its users, and routers in front of it may forward any path. So
the list here is of what is *open*, and everything else is closed: paths that a later vLLM, a plug-in or a development
switch adds among them.

Invariants:
- without a key in the environment every closed path is refused, to everybody;
- the path that is judged is the one that the application routes by;
- a refusal says nothing about the key, and takes as long whatever was presented.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rlfleet_vllm import setup

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

#: The key of this engine; the operator makes one per pod and tells it to engine and gate alone.
KEY_ENV = "RLFLEET_ENGINE_ADMIN_KEY"

#: What users, routers, probes and scrapers may ask of vLLM 0.32, whose own ``--api-key`` still holds for its part.
USER_PATHS = frozenset(
    {
        # probes, scrapers, routers
        "/health",
        "/load",
        "/metrics",
        "/metrics/",
        "/ping",
        "/version",
        # generation
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/models",
        "/v1/realtime",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/systemone",
        # tokens, embeddings, scores
        "/classify",
        "/detokenize",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)
#: /v1/responses/{id} and /v1/responses/{id}/cancel.
USER_PREFIXES = ("/v1/responses/",)

_UNAUTHORIZED = "this path is the gate's: it needs the engine's admin key (Authorization: Bearer)"
_NO_KEY = f"this path is the gate's, and the engine was given no {KEY_ENV}, so nobody may use it"


class ControlKey:
    """The middleware; vLLM makes it of ``--middleware rlfleet_vllm.ControlKey``."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ.get(KEY_ENV, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a user's request on, and one that presents the key."""
        if scope["type"] == "lifespan" or is_open(route_path(scope)) or self._presents_key(scope):
            if scope["type"] == "http" and route_path(scope) == setup.PATH:
                # The application was told its configuration before it began to serve.
                await _answer(send, 200, setup.describe(getattr(scope["app"].state, "vllm_config", None)))
                return
            await self._app(scope, receive, send)
            return
        status, text = (401, _UNAUTHORIZED) if self._key else (403, _NO_KEY)
        if scope["type"] == "websocket":
            # Before it is accepted this answers 403.
            await send({"type": "websocket.close", "code": 1008, "reason": text})
            return
        error = {"message": text, "type": "Unauthorized", "param": None, "code": status}
        await _answer(send, status, {"error": error})

    def _presents_key(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers") or () if name.lower() == b"authorization"]
        # Two of them may be read differently further on.
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        same = hmac.compare_digest(token.strip(), self._key)
        return bool(self._key) and scheme.lower() == b"bearer" and same


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def route_path(scope: Message) -> str:
    """The path that the application looks up: without the prefix that a proxy in front of it adds (``--root-path``)."""
    path, root = str(scope.get("path") or ""), str(scope.get("root_path") or "")
    if not root or not path.startswith(root):
        return path
    rest = path[len(root) :]
    return rest if not rest or rest.startswith("/") else path


def is_open(path: str) -> bool:
    """Whether a path is one of users."""
    return path in USER_PATHS or path.startswith(USER_PREFIXES)
