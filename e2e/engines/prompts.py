"""What engines are asked greedily, to be compared with the reference's answers."""

from __future__ import annotations

#: Tokens that every answer has.
TOKENS = 12

#: A short prompt, and one long enough to fill several blocks of a prefix cache.
PROMPTS = ([75, 72, 79], [3 + (i * 37 + i * i) % 256 for i in range(600)])
