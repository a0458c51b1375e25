"""Stop strings of a request as a list. Must not know: replies. Test: tests/model/test_api_wrong_values.py."""

from __future__ import annotations

from typing import Any

from draftwood.errors import OptionError


def listed_stops(stop: Any) -> list[str]:
    """Return stop=, a str or some of them, as a list; None stands for none. Errors: OptionError."""
    stops = [] if stop is None else list(stop) if isinstance(stop, (list, tuple)) else [stop]
    if not all(isinstance(each, str) for each in stops):
        raise OptionError(
            f"found stop={stop!r:.80}; expected a str or a list of some",
            hint='stop=["END"]; stopping_criteria= can end a text at a token',
        )
    return stops
