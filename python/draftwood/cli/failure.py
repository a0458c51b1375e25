"""Exit codes, and installation failures in one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

INTERRUPTED = 130
"""After Ctrl-C: 128 and the signal's number, as shells have it."""


@contextmanager
def library_needed() -> Iterator[None]:
    """Import what loads the library in here: whatever keeps it from loading becomes one message."""
    try:
        yield
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        hint = "`draftwood doctor` says what is wrong with this installation"
        raise click.ClickException(f"draftwood's library cannot be used: {error}\n\nhint: {hint}") from error
