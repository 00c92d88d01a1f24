"""Arguments of an engine that new weights would not reach as a whole: refused by name, before a pod is made of them.

Only what the pool's spec shows can be judged here. What an engine is really started with its gate asks it, and the
round's plan refuses the rest.

Invariant: a rule names the flag as it stands there, what is the matter with it, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rlfleet.api.conditions import Reason
from rlfleet.plan.command_line import values


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that an engine must not be started as."""

    flags: tuple[str, ...]
    reason: Reason
    advice: str
    harmless: tuple[str, ...] = ()
    """Values with which the flag says nothing."""
    switch: bool = False
    """The flag takes no value."""


_EXPERTS: Final = "each rank holds experts of its own, which weights would have to be sorted for: leave it out"
_DRAFT: Final = "rounds bring no weights to a draft model, which would go on guessing for the old policy: leave it out"
_LORA: Final = "adapters stay what they are when the weights under them change: leave it out and train merged weights"
_QUANTIZED: Final = "a round brings weights as the trainer has them, which had to be quantised anew: leave it out"

RULES: Final[Sequence[Rule]] = (
    Rule(
        ("--nnodes", "-n"),
        Reason.ENGINE_SPANS_PODS,
        "one pod is one engine: choose a parallelism that fits one node",
        harmless=("1",),
    ),
    Rule(
        ("--dp-size", "--data-parallel-size", "--dp", "-dp"),
        Reason.ENGINE_DATA_PARALLEL,
        "weights reach only one of its replicas: leave it out and raise spec.replicas",
        harmless=("1",),
    ),
    Rule(
        ("--disaggregation-mode",),
        Reason.ENGINE_DISAGGREGATED,
        "prefill and decode engines answer only together, and a round would pause one without the other: leave it out",
        harmless=("null",),
    ),
    Rule(("--enable-lora",), Reason.ENGINE_LORA, _LORA, switch=True),
    Rule(("--lora-paths", "--lora-modules", "--uno-lora-path"), Reason.ENGINE_LORA, _LORA),
    Rule(
        ("--quantization", "-q", "--quantization-config", "--torchao-config"),
        Reason.ENGINE_QUANTIZED,
        _QUANTIZED,
        harmless=("none", "None", "unquant"),
    ),
    Rule(("--quantize-and-serve",), Reason.ENGINE_QUANTIZED, _QUANTIZED, switch=True),
    Rule(
        (
            *("--speculative-config", "-sc", "--spec-method", "--spec-model"),
            *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-model"),
        ),
        Reason.ENGINE_DRAFT_MODEL,
        _DRAFT,
    ),
    Rule(
        ("--ep-size", "--expert-parallel-size", "--ep", "--moe-dp-size"),
        Reason.ENGINE_EXPERT_PARALLEL,
        _EXPERTS,
        harmless=("1",),
    ),
    Rule(("--moe-a2a-backend",), Reason.ENGINE_EXPERT_PARALLEL, _EXPERTS, harmless=("none",)),
    Rule(
        ("--enable-expert-parallel", "-ep", "--enable-eplb", "--enable-elastic-ep"),
        Reason.ENGINE_EXPERT_PARALLEL,
        _EXPERTS,
        switch=True,
    ),
)


def refused(words: Sequence[str]) -> Iterable[tuple[Reason, str]]:
    """(reason, "runs with ...") of every rule that a command line breaks, once each."""
    started = next((i for i, word in enumerate(words) if "vllm" in word), len(words))
    for rule in RULES:
        found = values(words, [flag for flag in rule.flags if flag.startswith("--")])
        # One letter means something else to a shell, and to whatever runs before the engine.
        found += values(words[started:], [flag for flag in rule.flags if not flag.startswith("--")])
        if not found:
            continue
        flag, value = found[-1]
        if rule.switch:
            yield rule.reason, f"runs with {flag}; {rule.advice}"
        elif value not in rule.harmless:
            yield rule.reason, f"runs with {flag} {value}".rstrip() + f"; {rule.advice}"
