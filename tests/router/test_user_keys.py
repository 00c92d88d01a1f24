"""A key that engines demand of their users (spec.engine.apiKeySecretRef), behind real routers: clients present it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rlfleet.router import make_router
from tests.gate.kit import Engine, Router

KEY = {"Authorization": "Bearer for-users-only"}
#: More than a breaker of any of them forgives.
STRANGERS = 30


@pytest.mark.parametrize(
    ("kind", "arguments", "shut"),
    [
        # It would try again after a minute; however slow the machine, that is not now.
        ("SGLangRouter", ("--cb-timeout-duration-secs", "3600"), True),
        ("SGLangRouter", ("--disable-circuit-breaker",), False),
        ("SMG", (), False),
        ("VLLMRouter", (), False),
    ],
)
async def test_routers_pass_the_key_on_and_one_takes_strangers_for_its_engines_failure(
    tmp_path: Path, kind: str, arguments: tuple[str, ...], shut: bool
) -> None:
    engine, router = Engine(tmp_path, "--api-key=for-users-only"), Router(tmp_path, kind, *arguments)
    engine.http.headers.update(KEY)
    adapter = make_router(kind, router.start().url)
    try:
        await adapter.add(engine.up().url, seconds=30)
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as http:

            async def ask(headers: dict[str, str]) -> int:
                body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
                return (await http.post("/generate", json=body, headers=headers)).status_code

            assert await ask({}) == 401
            assert await ask({"Authorization": "Bearer another"}) == 401
            assert await ask(KEY) == 200
            for _ in range(STRANGERS):
                await ask({})
            assert await ask(KEY) == (503 if shut else 200)
    finally:
        await adapter.close()
        router.close()
        engine.close()
