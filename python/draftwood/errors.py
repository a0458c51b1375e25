"""Every exception that draftwood raises of its own.

Each also derives from the builtin that llama-cpp-python raises in the same place, so existing
except-clauses keep working. A message says what was found, what was expected and the fix; a `hint`
follows after a blank line. Test: tests/unit/test_errors.py.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IDS_HINT = "tokenize() of this very model gives ids that it knows"


class DraftwoodError(Exception):
    """Base of all draftwood errors."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(f"{message}\n\nhint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class OptionError(DraftwoodError, ValueError):
    """An argument that makes no sense, or does not go with another."""


class UnsupportedError(DraftwoodError, ValueError):
    """This model, context or build cannot do what was asked."""


class ModelFileError(DraftwoodError, ValueError):
    """A model file that is missing, cut off, or of another kind."""


class GrammarError(DraftwoodError, ValueError):
    """A grammar that does not parse, or that nothing can follow any more."""


class DrafterMemoryError(DraftwoodError, MemoryError):
    """No memory for the drafter; the model itself is loaded and works."""


class ExpertMemoryError(DraftwoodError, MemoryError):
    """No memory for experts of which a card holds a part."""


class ServerError(DraftwoodError, ConnectionError):
    """An RPC server that does not answer, or not as one of this version does."""


class StateError(DraftwoodError, RuntimeError):
    """A saved state that does not belong to this model or context."""


class CacheError(DraftwoodError, OSError):
    """A cache of states that cannot be read or written."""


class ContextFullError(DraftwoodError, RuntimeError):
    """The context has no room for another token."""


class DecodeError(DraftwoodError, RuntimeError):
    """llama_decode failed; the context went back to a checkpoint or to its start."""


class ClosedError(DraftwoodError, RuntimeError):
    """A use of a Llama after its close()."""


class NativeError(DraftwoodError, RuntimeError):
    """A failure inside the library that no other class names."""


def no_tokens(hint: str) -> OptionError:
    """Return the error for a prompt without tokens; hint: what the caller can pass instead."""
    return OptionError("found a prompt without tokens; expected one token at least", hint=hint)


@contextlib.contextmanager
def translated(
    kinds: type[Exception] | tuple[type[Exception], ...], to: Callable[[Exception], DraftwoodError]
) -> Iterator[None]:
    """Raise `to(error)` in place of an error of `kinds` that the block raises."""
    try:
        yield
    except kinds as error:
        raise to(error) from error
