"""Exit codes, and the one way in which a command fails: a sentence that names the object and the remedy.

Invariant: no traceback reaches the user for anything that can happen outside of this program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from rlfleet.client import errors


class Exit(IntEnum):
    """What a command's exit code says; documented in docs/reference/cli.md."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    NOT_FOUND = 3
    FORBIDDEN = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    INTERRUPTED = 130


MEANING = {
    Exit.OK: "done; nothing is wrong",
    Exit.PROBLEM: "done, and there is a problem: the sync failed, `explain` says that the round would not run, "
    "`doctor` found something to fix",
    Exit.USAGE: "wrong usage: an unknown command, option or value",
    Exit.NOT_FOUND: "the object or the namespace does not exist, or the CRDs are not installed",
    Exit.FORBIDDEN: "the apiserver or the operator does not accept these credentials, or RBAC does not allow it",
    Exit.UNREACHABLE: "no usable kubeconfig, or the apiserver or the operator does not answer",
    Exit.TIMEOUT: "what was waited for did not happen in time; it goes on",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
}


class CliError(Exception):
    """A command can not go on. ``code``: its exit code."""

    def __init__(self, message: str, code: Exit = Exit.PROBLEM) -> None:
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[errors.ClientError], Exit], ...] = (
    (errors.NotFound, Exit.NOT_FOUND),
    (errors.Forbidden, Exit.FORBIDDEN),
    (errors.Unauthenticated, Exit.FORBIDDEN),
    (errors.ConfigError, Exit.UNREACHABLE),
    (errors.ApiUnavailable, Exit.UNREACHABLE),
    (errors.SyncTimeout, Exit.TIMEOUT),
    (errors.WaitTimeout, Exit.TIMEOUT),
)
#: Remedies of the SDK that are arguments of its calls, and what they are on the command line.
_REMEDIES = (
    ("check Client(namespace=..., pipeline=...)", "check the name and --namespace"),
    ("check Client(namespace=...)", "check --namespace"),
)


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the SDK as errors of a command."""
    try:
        yield
    except errors.ClientError as e:
        code = next((code for kind, code in _CODES if isinstance(e, kind)), Exit.PROBLEM)
        text = str(e)
        for call, option in _REMEDIES:
            text = text.replace(call, option)
        raise CliError(text, code) from e
