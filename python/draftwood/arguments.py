"""llama-cpp-python arguments that this build has to correct before upstream's constructor sees them.

Each correction is said in a UserWarning that points at the caller of `Llama(...)`. Decides from the arguments
alone. Must not know: the library, contexts. Test: tests/model/test_generate.py.
"""

from __future__ import annotations

import warnings
from typing import Any


def raise_batch(kwargs: dict[str, Any], needed: int) -> dict[str, int]:
    """Raise n_batch and n_ubatch in `kwargs` to what a draft needs, say so, and return what was raised.

    n_ubatch 0 means n_batch and stays.
    """
    small = {name: kwargs[name] for name in ("n_batch", "n_ubatch") if 0 < kwargs.get(name, needed) < needed}
    if small:
        found = ", ".join(f"{name}={value}" for name, value in small.items())
        warnings.warn(
            f"found {found}; a draft needs at least {needed}, which is used instead "
            '(speculation="off" leaves it as it is)',
            stacklevel=3,
        )
        kwargs.update(dict.fromkeys(small, needed))
    return small
