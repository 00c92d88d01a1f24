"""The command line of a pool's engine as far as the pool says it, word by word.

Invariant: what a shell or the container runtime would only know later (``$(NAME)``, ``$NAME``) is no value here: it is
neither believed nor refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


def words_of(container: Mapping[str, Any]) -> list[str]:
    """``command`` and ``args``; words that hold a command line of their own (``sh -c "..."``) are taken apart."""
    given = [str(w) for w in [*(container.get("command") or []), *(container.get("args") or [])]]
    return [part for word in given for part in _split(word)]


def _split(word: str) -> list[str]:
    # What no shell could read is left as it is.
    try:
        return shlex.split(word) if " " in word else [word]
    except ValueError:
        return [word]


def values(words: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Every (flag, value) of the flags ``names``, however they are written; "" for a flag without a value."""
    found = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        written, equals, value = word.partition("=")
        # vLLM takes underscores for dashes, and --config.key for one key of a flag that holds JSON.
        name = written.split(".", 1)[0].replace("_", "-") if written.startswith("-") else written
        if name in names:
            found.append((written, value if equals else ("" if following.startswith("--") else following)))
    return found


def value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value that counts: the last; None where no flag of ``names`` is given."""
    found = values(words, names)
    return found[-1][1] if found else None


def is_literal(text: str) -> bool:
    """Whether a value stands there as it is, and is not made from variables."""
    return bool(text) and "$" not in text
