"""Engines that a round could not bring new weights to as a whole, by the arguments that name them."""

from __future__ import annotations

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.plan.engine_arguments import RULES, refused

VLLM = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
SGLANG = ["python3", "-m", "sglang.launch_server", "--model-path", "m"]
#: As vLLM 0.32 and SGLang 0.5.23 spell them.
SPELLINGS = [
    (VLLM, "--enable-lora", Reason.ENGINE_LORA),
    (VLLM, "--enable_lora", Reason.ENGINE_LORA),
    (VLLM, "--lora-modules a=b", Reason.ENGINE_LORA),
    (SGLANG, "--lora-paths a=b", Reason.ENGINE_LORA),
    (VLLM, "--quantization fp8", Reason.ENGINE_QUANTIZED),
    (VLLM, "-q fp8", Reason.ENGINE_QUANTIZED),
    (SGLANG, "--quantization=awq", Reason.ENGINE_QUANTIZED),
    (SGLANG, "--quantize-and-serve", Reason.ENGINE_QUANTIZED),
    (SGLANG, "--torchao-config int8wo", Reason.ENGINE_QUANTIZED),
    (VLLM, "--speculative-config {}", Reason.ENGINE_DRAFT_MODEL),
    (VLLM, "-sc.method ngram", Reason.ENGINE_DRAFT_MODEL),
    (VLLM, "--spec-method eagle", Reason.ENGINE_DRAFT_MODEL),
    (SGLANG, "--speculative-algorithm EAGLE", Reason.ENGINE_DRAFT_MODEL),
    (SGLANG, "--speculative-draft-model-path m", Reason.ENGINE_DRAFT_MODEL),
    (VLLM, "--enable-expert-parallel", Reason.ENGINE_EXPERT_PARALLEL),
    (VLLM, "-ep", Reason.ENGINE_EXPERT_PARALLEL),
    (SGLANG, "--ep-size 2", Reason.ENGINE_EXPERT_PARALLEL),
    (SGLANG, "--moe-a2a-backend deepep", Reason.ENGINE_EXPERT_PARALLEL),
    (VLLM, "-dp 2", Reason.ENGINE_DATA_PARALLEL),
    (VLLM, "-n 2", Reason.ENGINE_SPANS_PODS),
]


@pytest.mark.parametrize(("program", "text", "reason"), SPELLINGS)
def test_each_spelling_is_refused_by_the_name_it_has(program: list[str], text: str, reason: Reason) -> None:
    found = list(refused([*program, *text.split(" ")]))
    assert [r for r, _ in found] == [reason]
    assert found[0][1].startswith(f"runs with {text.replace('=awq', ' awq')}; ")


def test_every_rule_ends_with_what_to_do() -> None:
    for rule in RULES:
        assert any(word in rule.advice for word in ("leave it out", "choose")), rule


def test_a_plain_engine_is_not_refused() -> None:
    assert not list(refused([*VLLM, "--tensor-parallel-size", "2", "--max-num-seqs", "16"]))
    assert not list(refused([*SGLANG, "--tp-size", "2", "--no-enable-lora"]))
