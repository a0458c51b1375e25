#!/usr/bin/env python3
"""Hold the table of docs/options.md against the code (--write writes it), and its prose to one row an option.

    python tools/options_table.py [--write] [FILE]

Names, defaults and flags come from `Llama` and from the commands. What an option does, costs and is for is
written by hand in the page. Test: tests/unit/test_docs_options.py.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from _paths import ROOT
from draftwood import Llama, options
from draftwood.cli import cli, serve

PAGE = ROOT / "docs" / "options.md"
BEGIN, END = "<!-- written by tools/options_table.py -->\n", "<!-- end of the options -->\n"

# what `None` stands for in the signature of `Llama`
NONE = {
    "speculative": "none",
    "drafter": "none",
    "draft_tokens": f'{options.DEFAULT_DRAFT_TOKENS}; {options.CPU_DRAFT_TOKENS} with `"mtp"` on a CPU; '
    f'{options.TREE_DRAFT_TOKENS} with `"auto"`, `"tree"` or a `tree_budget`; '
    f"{options.GIVEN_DRAFT_TOKENS} with a `draft_model`",
    "tree_budget": f'{options.DEFAULT_TREE_BUDGET} with `"tree"`; up to {options.DEFAULT_TREE_BUDGET} with '
    '`"auto"`; else chains',
    "draft_model": "none",
    "draft_vocab": "an eighth of the vocabulary, a quarter on a card",
    "tensor_buft_overrides": "none",
    "rpc_servers": "none",
    "vram": "what is free, for a model larger than its one card; else no pool",
    "expert_vram": "none",
    "expert_heat": "no file",
    "expert_guess": "on with a pool on a card, else off",
    "expert_readahead": "on for a model larger than memory, else off",
    "chat_template_kwargs": "none",
    "reasoning_format": "thoughts stay in the text",
    "parse_tool_calls": "off",
}
# llama-server's names; any other flag of `draftwood run` has the same name there, unless `serve` refuses it
SERVE = {
    "drafter": "-md",
    "draft_tokens": "--spec-draft-n-max",
    "n_cpu_moe": "--n-cpu-moe",
    "tensor_buft_overrides": "--override-tensor",
    "chat_template_kwargs": "--chat-template-kwargs",
    "reasoning_format": "--reasoning-format",
}


def arguments() -> dict[str, Any]:
    """Return the keyword arguments of `Llama` beside llama-cpp-python's own, with their defaults."""
    return dict(Llama.__init__.__kwdefaults__ or {})


def default(name: str, value: Any) -> str:
    if value is None:
        return NONE.get(name, "")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20:
        return f"{value >> 20} MiB"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that take options of `Llama` by names of draftwood."""
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        elif name != "serve":
            yield name, command


def flags(argument: str) -> tuple[str, list[str]]:
    """Return the flag for an argument, empty if there is none, and its commands (with their own default)."""
    spelled, have = "", []
    for name, command in commands():
        for each in command.params:
            if isinstance(each, click.Option) and each.name == argument:
                spelled = ", ".join(f"`{flag}`" for flag in (*each.opts, *each.secondary_opts))
                differs = isinstance(each.default, str) and each.default != arguments()[argument]
                have.append(f"`{name}` (`{each.default}`)" if differs else f"`{name}`")
    return spelled, have


def served(argument: str, flag: str) -> str:
    """Return llama-server's flag for an argument; empty if it has none."""
    taken = [each for each in re.findall(r"`(.+?)`", flag) if each not in serve._OTHERWISE]
    return f"`{SERVE[argument]}`" if argument in SERVE else ", ".join(f"`{each}`" for each in taken)


def table() -> str:
    """Return the table of docs/options.md."""
    lines = ["| argument of `Llama` | default | flag | commands | `serve` |", "|---|---|---|---|---|"]
    for name, value in arguments().items():
        flag, have = flags(name)
        cells = [f"`{name}`", default(name, value), flag, ", ".join(have), served(name, flag)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def faults(prose: str) -> Iterator[str]:
    """Yield each option whose prose is missing or of no use."""
    names = list(arguments())
    described = re.findall(r"^\| `(\w+)` \|", prose, re.M)
    for name in dict.fromkeys([*names, *described]):
        if described.count(name) != (name in names):
            yield f"{name}: found {described.count(name)} rows of prose; expected {int(name in names)}"
    for name, value in {**dict.fromkeys(NONE, ""), **arguments()}.items():
        if (value is None) != (name in NONE):
            yield f"{name}: found {value!r} as its default; expected a row of NONE for None alone"
    for name, flag in SERVE.items():
        if flag in serve._OTHERWISE:
            yield f"{name}: `draftwood serve` refuses {flag}"


def main(given: list[str]) -> int:
    """Return 1 for a fault."""
    page = Path(next((each for each in given if each != "--write"), PAGE))
    before, _, old = page.read_text("utf-8").partition(BEGIN)
    prose = old.partition(END)[2]
    written = before + BEGIN + table() + END + prose
    if "--write" in given:
        page.write_text(written, "utf-8")
    found = list(faults(before + prose))
    if page.read_text("utf-8") != written:
        found.append(f"{page}: the table is stale; expected that of tools/options_table.py --write")
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
