"""Errors that say what happened, why, and what to do.

Every error a user can cause derives from `ZeroError` and carries its three parts as attributes, so that a
front end can show them its own way and a test can read them. Who may raise: everybody; who may not: code that
finds a broken internal invariant, which uses `assert` with the values in its text.

An error that only one rank can see is first agreed on by all ranks (`comm.collectives.Collectives.agree`), so
that every rank raises and none waits for one that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable


class ZeroError(Exception):
    """Base of all errors of this library.

    Attributes:
        what: What happened, with names and numbers.
        why: The reason it cannot go on.
        fix: What the user can do about it.
    """

    def __init__(self, *, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what = what
        self.why = why
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive a process boundary without this.
        return (_rebuild, (type(self), self.what, self.why, self.fix))


class ConfigError(ZeroError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class ShardingError(ZeroError, RuntimeError):
    """A model, parameter or optimizer was used in a way its sharded state does not allow."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged, or does not fit what it is loaded into."""


class OffloadError(ZeroError, OSError):
    """A tier (host memory, NVMe) that cannot hold or return what it was given."""


def first_line(error: BaseException) -> str:
    """Return what an exception says in its first line; its class where it says nothing."""
    return str(error).partition("\n")[0] or type(error).__name__


def some(names: Iterable[str], limit: int = 8, separator: str = ", ") -> str:
    """List names for a message: the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (separator.join(names[:limit]) or "nothing") + more


def _rebuild(cls: type[ZeroError], what: str, why: str, fix: str) -> ZeroError:
    return cls(what=what, why=why, fix=fix)
