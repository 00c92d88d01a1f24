"""Errors are told in the words of the command line, with its exit codes."""

from __future__ import annotations

import pytest

from rlfleet.cli.act import how_they_go, refuse_empty_drain, told
from rlfleet.cli.failures import CliError, Exit, explained
from rlfleet.client import errors


def failed(hint: str) -> errors.SyncFailed:
    text = f"round r ended as Failed in Staging (StagingDeadline): late. {hint}"
    return errors.SyncFailed(
        text,
        version=2,
        round="r",
        committed=False,
        phase="Failed",
        stage="Staging",
        reason="StagingDeadline",
        digest="",
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            errors.SyncTimeout("x: call sync(2) again", version=2, round="r", committed=False, phase="Staging"),
            Exit.TIMEOUT,
            ["was Staging", "rlfleet cancel r -n ns", "rlfleet round show r -n ns"],
        ),
        (
            errors.HoldingNeedsAction(
                "SyncRound r needs a person: delete pod a. It goes on: call sync(2) again", version=2, round="r"
            ),
            Exit.PROBLEM,
            ["delete pod a", "rlfleet round show r"],
        ),
        (failed("Try again with sync(..., retries=1)"), Exit.PROBLEM, ["late", "with --retries 1", "round show r"]),
        (
            errors.SyncRefused("sync(..., allow_rollback=True) if meant", version=0, reason="VersionGoesBackwards"),
            Exit.PROBLEM,
            ["--rollback if meant"],
        ),
    ],
)
def test_no_remedy_is_a_call_of_the_sdk(error: errors.SyncError, code: Exit, words: list[str]) -> None:
    said = told(error, "ns")
    assert said.code is code
    assert "sync(" not in str(said)
    assert "None" not in str(said)
    for word in words:
        assert word in str(said)


def test_a_drain_that_would_put_nobody_to_sleep_is_refused() -> None:
    spec = {"replicas": 2, "source": {"template": {}}}
    refuse_empty_drain("ns/e", spec, 1)
    with pytest.raises(CliError, match=r"spec\.replicas 2: --to 2 would put nobody to sleep") as refused:
        refuse_empty_drain("ns/e", spec, 2)
    assert refused.value.code is Exit.USAGE
    # spec.replicas of an adopted pool is always 1, however many pods there are.
    refuse_empty_drain("ns/e", {"replicas": 1, "source": {"adopt": {"selector": {}}}}, 3)


def test_a_drain_says_what_becomes_of_the_engines() -> None:
    assert "lose their pods" in how_they_go({"source": {"template": {}}})
    assert "sleep" in how_they_go({"source": {"template": {}}, "shrink": "Offload"})
    assert "sleep" in how_they_go({"source": {"template": {}}, "placement": {"mode": "Pinned"}})
    # Adopted pods are never deleted.
    assert "sleep" in how_they_go({"source": {"adopt": {"selector": {}}}})


@pytest.mark.parametrize(
    "text", ["there is no RLPipeline 'x': check Client(namespace=..., pipeline=...)", "check Client(namespace=...)"]
)
def test_what_does_not_exist_is_told_without_a_call_of_the_sdk(text: str) -> None:
    with pytest.raises(CliError, match="--namespace") as said, explained():
        raise errors.NotFound(text)
    assert "Client(" not in str(said.value)
    assert said.value.code is Exit.NOT_FOUND
