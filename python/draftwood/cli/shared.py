"""Options that more than one command has. Must not know: commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from draftwood.load.arguments import MAX_THREADS
from draftwood.options import (
    CPU_DRAFT_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_TREE_BUDGET,
    MAX_DRAFT_TOKENS,
    MAX_TREE_BUDGET,
    TREE_DRAFT_TOKENS,
)

Option = Callable[[Callable[..., Any]], Callable[..., Any]]
THREADS = click.IntRange(1, MAX_THREADS)
N_CTX = 4096
"""Tokens of a context by default."""
FIRST_ALONE = "give the first of the model's files alone: the others are found beside it"

drafter = click.option(
    "--drafter", type=click.Path(dir_okay=False), help="GGUF of a DFlash drafter for MODEL."
)
n_gpu_layers = click.option("--n-gpu-layers", type=click.IntRange(min=-1), default=0, show_default=True,
                            help="Layers on GPUs; -1: all.")  # fmt: skip
n_card_layers = click.option("--n-gpu-layers", type=click.IntRange(min=-1),
                             help="Layers on GPUs; -1: all. Default: all where CUDA cards have room, or one "
                             "has it for all but experts; else 0.")  # fmt: skip
vram = click.option("--vram", metavar="SIZE",
                    help="Bytes of the card for everything, such as 12GiB: experts that do not fit stay in "
                    "host memory.")  # fmt: skip
expert_vram = click.option("--expert-vram", metavar="SIZE", help="Bytes of the card for experts alone.")
expert_heat = click.option(
    "--expert-heat",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Keep which experts are used most in this file, to begin with them.",
)
expert_guess = click.option("--expert-guess/--no-expert-guess", default=None,
                            help="Fetch experts while the layer before theirs computes. "
                            "Default: on a card.")  # fmt: skip
expert_readahead = click.option("--expert-readahead/--no-expert-readahead", default=None,
                                help="Read chosen experts of a mapped file together. "
                                "Default: for a model larger than memory.")  # fmt: skip
rpc = click.option("--rpc", "rpc_servers", metavar="HOST:PORT,...",
                   help="RPC servers that get layers (--n-gpu-layers says how many).")  # fmt: skip
draft_tokens = click.option("--draft-tokens", type=click.IntRange(1, MAX_DRAFT_TOKENS),
                            help="Longest draft of a round; in a tree, its longest path. Default: "
                            f"{TREE_DRAFT_TOKENS} with auto and in trees, {CPU_DRAFT_TOKENS} with "
                            f"mtp on a CPU, else {DEFAULT_DRAFT_TOKENS}.")  # fmt: skip


def tree_budget(least: int = 1) -> Option:
    """Return --tree-budget, of `least` rows or more."""
    return click.option("--tree-budget", type=click.IntRange(least, MAX_TREE_BUDGET),
                        help="Draft trees of at most this many rows, the newest token's included. "
                        f"Default: {DEFAULT_TREE_BUDGET} if drafts are trees.")  # fmt: skip
