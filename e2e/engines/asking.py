"""Real engines as a client of theirs sees them, without any code of the adapters that are tested with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from e2e.engines.prompts import PROMPTS, TOKENS
from e2e.engines.serving import PORT, SERVED_NAME
from e2e.scenarios.kit import http


@dataclass(frozen=True)
class Answer:
    """A finished request. ``spans``: (version, first token, end), where the engine tells them."""

    tokens: list[int]
    reason: str
    spans: list[tuple[str, int, int]]
    retractions: int = 0


class RealEngine:
    """One pod's engine."""

    def __init__(self, engine: str, pod: dict[str, Any]) -> None:
        self.engine = engine
        self.name = str(pod["metadata"]["name"])
        self.url = f"http://{pod['status']['podIP']}:{PORT}"

    def ask(self, prompt: list[int], tokens: int = TOKENS, *, url: str | None = None, seconds: float = 120.0) -> Answer:
        """One greedy request, at ``url`` (a router) or at the engine itself."""
        if self.engine == "VLLM":
            body: dict[str, Any] = {
                "model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            code, answer = http("POST", (url or self.url) + "/v1/completions", body, timeout=seconds)
            assert code == 200, answer
            choice = answer["choices"][0]
            return Answer([int(t) for t in choice["token_ids"]], str(choice["finish_reason"]), [])
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        code, answer = http(
            "POST", (url or self.url) + "/generate", {"input_ids": prompt, "sampling_params": how}, timeout=seconds
        )
        assert code == 200, answer
        meta = answer["meta_info"]
        spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in meta["weight_versions"]]
        reason, retractions = str(meta["finish_reason"]["type"]), int(meta["num_retractions"])
        return Answer([int(t) for t in answer["output_ids"]], reason, spans, retractions)

    def greedy(self) -> list[list[int]]:
        """Its continuations of all prompts."""
        return [self.ask(prompt).tokens for prompt in PROMPTS]

    def label(self) -> str:
        """The version that it says it has."""
        path = "/weight_info" if self.engine == "VLLM" else "/model_info"
        return str(http("GET", self.url + path)[1]["weight_version"])

    def checksum(self) -> str:
        """SGLang's own hash of its parameters."""
        code, answer = http("POST", self.url + "/weights_checker", {"action": "checksum"}, timeout=60)
        assert code == 200, answer
        return str(answer["per_engine_checksum"])

    def running(self) -> int:
        """Requests that it works on now."""
        if self.engine == "VLLM":
            lines = str(http("GET", self.url + "/metrics")[1]).splitlines()
            return sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith("vllm:num_requests_running"))
        return sum(int(load["num_running_reqs"]) for load in http("GET", self.url + "/v1/loads")[1]["loads"])
