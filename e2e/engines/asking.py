"""Real engines as a client of theirs sees them, without any code of the adapters that are tested with them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from e2e.engines.prompts import PROMPTS, TOKENS
from e2e.engines.serving import PORT


@dataclass(frozen=True)
class Answer:
    """A finished request. ``spans``: (version, first token, end). ``retractions``: 0 where the engine does not tell."""

    tokens: list[int]
    reason: str
    spans: list[tuple[str, int, int]]
    retractions: int = 0


@dataclass(frozen=True)
class RealEngine:
    """One engine. ``key``: of its control paths; ``user``: of its users; None: it was given none."""

    engine: str
    name: str
    url: str
    uid: str = ""
    key: str | None = None
    user: str | None = None

    @classmethod
    def of_pod(cls, engine: str, pod: dict[str, Any]) -> RealEngine:
        """The engine in a pod."""
        containers = {c["name"]: c for c in pod["spec"]["containers"]}
        variables = {e["name"]: e.get("value") for e in containers["engine"].get("env", [])}
        return cls(
            engine,
            str(pod["metadata"]["name"]),
            f"http://{pod['status']['podIP']}:{PORT}",
            str(pod["metadata"]["uid"]),
            variables.get("RLFLEET_ENGINE_ADMIN_KEY"),
        )

    def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, seconds: float = 60.0
    ) -> tuple[int, Any]:
        """One JSON request; (status, parsed body)."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = json.dumps(body).encode() if body is not None else None
        url = path if path.startswith("http://") else self.url + path
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        return status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()

    def ask(self, prompt: list[int], tokens: int = TOKENS, *, url: str | None = None, seconds: float = 180.0) -> Answer:
        """One greedy request, at ``url`` (a router) or at the engine itself."""
        where = url or self.url
        if self.engine == "VLLM":
            how: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
            body: dict[str, Any] = {"token_ids": prompt, "sampling_params": how}
            code, answer = self.call("POST", where + "/inference/v1/generate", body, key=self.user, seconds=seconds)
            assert code == 200, answer
            choice = answer["choices"][0]
            given, reason, retractions = choice["token_ids"], str(choice["finish_reason"]), 0
            return Answer([int(t) for t in given], reason, _spans(choice), retractions)
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": how}
        code, answer = self.call("POST", where + "/generate", body, key=self.user, seconds=seconds)
        assert code == 200, answer
        meta = answer["meta_info"]
        reason, retractions = str(meta["finish_reason"]["type"]), int(meta["num_retractions"])
        return Answer([int(t) for t in answer["output_ids"]], reason, _spans(meta), retractions)

    def greedy(self) -> list[list[int]]:
        """Its continuations of all prompts."""
        return [self.ask(prompt).tokens for prompt in PROMPTS]

    def label(self) -> str:
        """The version that it says it has."""
        path, key = ("/weight_info", self.key) if self.engine == "VLLM" else ("/model_info", self.user)
        code, answer = self.call("GET", path, key=key)
        assert code == 200, answer
        return str(answer["weight_version"])

    def checksum(self) -> str:
        """SGLang's own hash of its parameters."""
        code, answer = self.call("POST", "/weights_checker", {"action": "checksum"}, key=self.key)
        assert code == 200, answer
        return str(answer["per_engine_checksum"])

    def running(self) -> int:
        """Requests that it works on now."""
        if self.engine == "VLLM":
            lines = str(self.call("GET", "/metrics")[1]).splitlines()
            return sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith("vllm:num_requests_running"))
        return sum(int(load["num_running_reqs"]) for load in self.call("GET", "/v1/loads")[1]["loads"])

    def door(self) -> int:
        """What a control path answers to somebody without its key."""
        path, body = ("/pause", None) if self.engine == "VLLM" else ("/pause_generation", {"mode": "retract"})
        return self.call("POST", path, body)[0]


def _spans(told: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(str(s["version"]), int(s["start"]), int(s["end"])) for s in told["weight_versions"]]
