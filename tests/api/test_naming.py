"""Names come from identity alone, fit their limits and do not collide by concatenation."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlfleet.api import labels
from rlfleet.api.naming import MAX_NAME, MAX_POOL_NAME, catch_up_name, engine_name, pod_name, round_name
from rlfleet.api.timestamps import epoch_ms, rfc3339

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)
VERSIONS = st.integers(-1, 2**53)


@given(NAMES, st.text(), st.text(), VERSIONS, st.integers(1, 1000))
@example("a" * 253, "u", "s", 2**53, 1000)
@example("-" + "a" * 9, "u", "s", 1, 1)
@example("a" + "-" * 251 + "a", "u", "s", 1, 1)
def test_round_names_are_labels_and_deterministic(name: str, uid: str, sender: str, version: int, attempt: int) -> None:
    made = round_name(name, uid, sender, version, attempt)
    assert len(made) <= MAX_NAME
    assert LABEL.fullmatch(made)
    assert made == round_name(name, uid, sender, version, attempt)
    word = "base" if version == -1 else str(version)
    assert re.search(rf"-v{word}-[0-9a-f]{{10}}$", made)


@pytest.mark.parametrize(
    "other",
    [("demo", "u2", "s", 3, 1), ("demo", "u", "s2", 3, 1), ("demo", "u", "s", 4, 1), ("demo", "u", "s", 3, 2)],
    ids=["pipeline uid", "sender incarnation", "version", "attempt"],
)
def test_each_part_of_a_rounds_identity_changes_its_name(other: tuple[str, str, str, int, int]) -> None:
    assert round_name(*other) != round_name("demo", "u", "s", 3, 1)


@given(NAMES, st.text(), st.lists(st.text(min_size=1)), VERSIONS, st.integers(1, 1000))
def test_catch_up_names_are_labels_whatever_the_order_of_the_members(
    name: str, uid: str, members: list[str], version: int, attempt: int
) -> None:
    made = catch_up_name(name, uid, "sha256:d", members, version, attempt)
    assert len(made) <= MAX_NAME
    assert LABEL.fullmatch(made)
    assert made == catch_up_name(name, uid, "sha256:d", reversed(members), version, attempt)


@pytest.mark.parametrize(
    "other",
    [("u2", "d", ["i"], 3, 1), ("u", "d2", ["i"], 3, 1), ("u", "d", ["i", "j"], 3, 1), ("u", "d", ["i"], 3, 2)],
    ids=["pipeline uid", "digest", "incarnations", "attempt"],
)
def test_each_part_of_a_catch_ups_identity_changes_its_name(other: tuple[str, str, list[str], int, int]) -> None:
    assert catch_up_name("demo", *other) != catch_up_name("demo", "u", "d", ["i"], 3, 1)
    assert catch_up_name("demo", *other) != round_name("demo", "u", "d", 3, 1)


def test_parts_of_an_identity_do_not_run_into_each_other() -> None:
    assert round_name("demo", "ab", "c", 3, 1) != round_name("demo", "a", "bc", 3, 1)
    assert round_name("demo", "u", "s", 1, 11) != round_name("demo", "u", "s", 11, 1)


def test_the_digits_do_not_depend_on_the_pipelines_name() -> None:
    assert round_name("demo", "u", "s", 3, 1)[-10:] == round_name("other", "u", "s", 3, 1)[-10:]


@given(NAMES, st.integers(0, 1023), st.text())
@example("a" * 253, 1023, "s")
@example("a" + "-" * 251 + "a", 1023, "s")
@example("..a", 0, "s")
def test_pod_names_are_labels_and_deterministic(pool: str, index: int, salt: str) -> None:
    made = pod_name(pool, index, salt)
    assert len(made) <= MAX_NAME
    assert LABEL.fullmatch(made)
    assert made == pod_name(pool, index, salt)
    assert re.search(rf"-{index}-[0-9a-f]{{5}}$", made)


def test_the_longest_pool_name_is_not_cut() -> None:
    pool = "p" * MAX_POOL_NAME
    assert pod_name(pool, 1023, "s").startswith(f"{pool}-1023-")
    assert engine_name(pool, 1023) == f"{pool}-1023"


def test_a_cut_prefix_does_not_end_in_a_dash() -> None:
    assert "--" not in round_name("a" * 40 + "-" * 10 + "b", "u", "s", 1, 1)
    assert "--" not in pod_name("a" * 50 + "-" * 10 + "b", 1, "s")
    assert pod_name("-pool", 1, "s").startswith("pool-1-")


def test_each_life_of_an_engine_has_its_own_pod_name() -> None:
    assert len({pod_name("pool", 0, f"uid/{n}") for n in range(20)}) == 20


def test_labels_and_finalizers_are_qualified_by_the_group() -> None:
    for text in (labels.PIPELINE, labels.POOL, labels.ENGINE_INDEX, labels.TEMPLATE_HASH, labels.ROUND_FINALIZER):
        assert text.startswith("rlfleet.dev/")
    managers = {labels.PIPELINE_MANAGER, labels.POOL_MANAGER, labels.ROUND_MANAGER, labels.CLIENT_MANAGER}
    assert len(managers) == 4


@given(st.integers(0, 253_402_300_799_999))
def test_times_survive_up_to_the_second(milliseconds: int) -> None:
    text = rfc3339(milliseconds)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text)
    assert epoch_ms(text) == milliseconds // 1000 * 1000


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="names no zone"):
        epoch_ms("2026-01-01T00:00:00")
