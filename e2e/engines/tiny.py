"""Tiny Llama checkpoints for real engines, and what transformers makes of them: the reference for every answer.

``python -m e2e.engines.tiny FOLDER SEED...``, run by the interpreter of an engine's environment. It writes
``FOLDER/<seed>`` (configuration, byte-level tokenizer, weights in float32) and ``FOLDER/expected.json``: by seed, the
greedy continuation of each prompt.

Invariant: the weights of a seed are ``e2e.sim.model``'s, so the trainer and the reference engine can hold the very
same model; the expected tokens come from transformers alone, which shares no code with us or with the engines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from e2e.engines.prompts import PROMPTS, TOKENS
from e2e.sim.model import MODELS, NORM_EPS, initial_state

MODEL = "llama"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *letters])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def _model(seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = MODELS[MODEL]
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_size,
            max_position_embeddings=c.context_length,
            rms_norm_eps=NORM_EPS,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    ).to(torch.float32)
    state = {name: torch.from_numpy(value) for name, value in initial_state(c, seed).items()}
    made.load_state_dict(state, strict=True)
    return made.eval()


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """Without a cache: every step reads the whole prefix."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def main() -> None:
    """Write checkpoints and expected answers."""
    folder, seeds = Path(sys.argv[1]), [int(s) for s in sys.argv[2:]]
    tokenizer = _tokenizer()
    expected = {}
    for seed in seeds:
        model = _model(seed)
        model.save_pretrained(folder / str(seed))
        tokenizer.save_pretrained(folder / str(seed))
        expected[str(seed)] = [_greedy(model, prompt) for prompt in PROMPTS]
    # Last: who finds it finds all of it.
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
