"""Values of flags on which llama-server would abort with a backtrace: refused before it starts.

Must not know: models, drafting. Test: tests/unit/test_cli_serve_values.py.
"""

from __future__ import annotations

from draftwood.cli.failure import library_needed
from draftwood.cli.server_flags import named_value, named_values
from draftwood.errors import OptionError
from draftwood.load.arguments import MAX_SIZE, MAX_THREADS, within

# names from common/arg.cpp at the pin: flags, the variable, least, most, a value for the hint
_NUMBERS = (
    (("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE", 0, MAX_SIZE, 8192),
    (("-b", "--batch-size"), "LLAMA_ARG_BATCH", 1, MAX_SIZE, 2048),
    (("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", 0, MAX_SIZE, 512),
    (("-t", "--threads"), "LLAMA_ARG_THREADS", -MAX_SIZE, MAX_THREADS, 4),  # 0 and below: all cores
    (("-tb", "--threads-batch"), "", -MAX_SIZE, MAX_THREADS, 4),
)


def check(arguments: list[str]) -> None:
    """Refuse numbers out of range, and RPC servers that do not answer. Errors: OptionError, ServerError.

    llama-server refuses texts that are no numbers itself.
    """
    for flags, variable, least, most, example in _NUMBERS:
        name, value = named_value(arguments, flags, variable)
        if (number := _number(value)) is not None:
            within(name, number, (least, most), f"{flags[0]} {example}, or leave it out")
    found = named_values(arguments, ("--rpc",), "LLAMA_ARG_RPC")  # llama-server connects to all of them
    if found:
        with library_needed():
            from draftwood.load import rpc
        hint = "--rpc 127.0.0.1:50052"
        addresses = [each for name, text in found for each in rpc.checked_addresses(name, text, hint)]
        spaced = next((text for _, text in found if text.split() != [text]), None)
        if spaced is not None:
            raise OptionError(f"--rpc is {spaced!r}; expected addresses without blanks", hint=hint)
        for address in dict.fromkeys(addresses):
            rpc.greet(address)


def _number(text: str | None) -> int | None:
    """Return a number; None for anything else, which llama-server refuses itself."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
