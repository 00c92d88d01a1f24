"""Every guard is needed: without it the explorer finds a story in which an invariant breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from tests.model import gate
from tests.model.explore import Report, explore
from tests.model.mutations import GUARDS, PAIRS, Mutation, Patch
from tests.model.state import Scope

#: States after which a counterexample should long have been found.
LIMIT = 80_000


@contextmanager
def without(patches: Iterable[Patch]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for p in patches:
            patch.setattr(p.owner, p.name, p.by)
        gate.forget()
        try:
            yield
        finally:
            gate.forget()


def search(scope: Scope, patches: Iterable[Patch]) -> Report:
    with without(patches):
        return explore(scope, limit=LIMIT)


@pytest.mark.parametrize("mutation", GUARDS, ids=lambda m: m.guard)
def test_without_this_guard_an_invariant_breaks(mutation: Mutation) -> None:
    report = search(mutation.scope, mutation.patches)
    assert mutation.finds in report.broken, str(report)


@pytest.mark.parametrize(("scope", "first", "second", "finds"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_two_guards_that_stand_behind_one_another(
    scope: Scope, first: tuple[Patch, ...], second: tuple[Patch, ...], finds: str
) -> None:
    assert finds in search(scope, (*first, *second)).broken
    for alone in (first, second):
        report = search(scope, alone)
        assert report.exhausted, str(report)
