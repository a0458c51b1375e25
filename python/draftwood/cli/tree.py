"""`draftwood tree`: what rounds draft after a prompt, drawn as trees, with what the target made of them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import click

from draftwood.cli import llama_flags
from draftwood.cli.inputs import load_session, model_options, prompt_options, prompt_text
from draftwood.cli.progress import Interrupt

if TYPE_CHECKING:
    from rich.tree import Tree as Drawing

    from draftwood.cli.session import Round, Session

Spell = Callable[[int], bytes]
"""A token's bytes, special tokens by their names."""

_SPECULATIONS = ("tree", "mtp", "dflash", "ngram")


@click.command("tree", cls=llama_flags.Command)
@prompt_options(chat=False, default="--raw")
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), default=1, show_default=True,
              help="Number of rounds.")  # fmt: skip
@click.option("--speculation", type=click.Choice(_SPECULATIONS), default="tree", show_default=True,
              help="tree: draft trees with --drafter, else with the MTP block. The others draft chains, "
                   "or trees if --tree-budget is given.")  # fmt: skip
@click.option("--temp", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="Sampling temperature; 0: greedy.")  # fmt: skip
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of trees.")
def command(model: str, prompt: str | None, file: IO[bytes] | None, **options: Any) -> None:
    """Draw what is drafted with the GGUF file MODEL after PROMPT.

    Each round is a tree. Its root is the newest token. Below it stand the drafted tokens with the probability
    of their path by the drafter. Marked are the tokens that the target accepted, and the bonus token that it
    added. PROMPT is continued as it stands. The text is that of plain decoding.
    """
    text = prompt_text(prompt, file)
    settings = {"speculation": options["speculation"]}
    with (
        Interrupt() as interrupt,
        contextlib.closing(load_session(model, interrupt, options, **settings)) as session,
    ):
        tokens, templated = session.encode_prompt(text, options["chat"])
        seen: list[Round] = []
        if session.chains_because and not options["as_json"]:
            click.echo(f"drafts are chains: {session.chains_because}", err=True)
        for each in session.rounds(tokens, options["n_rounds"], temp=options["temp"]):
            seen.append(each)
            if not options["as_json"]:
                _show(len(seen), each, lambda token: spelling(session, token))
        if options["as_json"]:
            click.echo(json.dumps(_as_dict(session, tokens, templated, seen, options["seed"])))
        elif len(seen) < options["n_rounds"]:
            click.echo(f"the text ends after {len(seen)} of {options['n_rounds']} rounds", err=True)


def spelling(session: Session, token: int) -> bytes:
    """Return a token's bytes, special tokens by their names."""
    piece: bytes = session.detokenize([token], special=True)
    return piece


# ---- drawing ----


def escaped(piece: bytes, *, only_ascii: bool = False) -> str:
    r"""Return a token in quotes: what does not print is escaped, bytes that are no text are b'\x..'."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return repr(piece)
    return ascii(text) if only_ascii else repr(text)


def probabilities(round_: Round) -> list[float | None]:
    """Return the path's probability by node; None at the root and where the drafter gave none."""
    log_probs = round_.tree.log_probs
    known = any(log_probs)
    return [math.exp(each) if known and i > 0 else None for i, each in enumerate(log_probs)]


def drawing(round_: Round, spell: Spell, *, only_ascii: bool = False) -> Drawing:
    """Return a round as rich draws it: accepted nodes and the bonus token are marked in words and colours."""
    from rich.text import Text
    from rich.tree import Tree as Drawing

    tree, accepted = round_.tree, set(round_.accepted)

    def label(token: int, *parts: str, style: str = "") -> Text:
        return Text("  ".join([escaped(spell(token), only_ascii=only_ascii), *parts]), style=style)

    drawn = [Drawing(label(tree.tokens[0], style="bold"), highlight=False)]
    for i, probability in list(enumerate(probabilities(round_)))[1:]:
        parts = [] if probability is None else [f"{probability:.2g}"]
        marked = [*parts, "accepted"] if i in accepted else parts
        style = "green" if i in accepted else "dim"
        drawn.append(drawn[tree.parents[i]].add(label(tree.tokens[i], *marked, style=style)))
    if round_.bonus is not None:
        last = max(accepted, default=0)  # of a path the deepest node comes last
        drawn[last].add(label(round_.bonus, "bonus", style="bold yellow"))
    return drawn[0]


def summary(round_: Round) -> str:
    """Return the line under a round: what it took and what plain decoding would have."""
    n, drafted = len(round_.emitted), len(round_.tree) - 1
    padding = round_.rows - len(round_.tree)
    rows = f"{round_.rows} row{'s' if round_.rows > 1 else ''}" + (f" ({padding} padding)" if padding else "")
    return (
        f"{rows}, {drafted} drafted, {len(round_.accepted)} accepted: {n} token{'s' if n > 1 else ''} "
        f"in 1 step of the model, plain decoding needs {n}"
    )


def _show(number: int, round_: Round, spell: Spell) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(
        console.width, 4 * max(round_.tree.depths) + 60
    )  # a terminal wraps it, nothing is cut
    if number > 1:
        console.print()
    console.print(drawing(round_, spell, only_ascii=not console.encoding.startswith("utf")))
    console.print(summary(round_), style="dim", soft_wrap=True)
    sys.stdout.flush()


# ---- JSON ----


def _as_dict(
    session: Session, prompt: list[int], templated: bool, rounds: list[Round], seed: int
) -> dict[str, Any]:
    """Return all rounds; `text` is theirs together, after the token that the prompt's evaluation gave."""
    ids = [*(rounds[0].tree.tokens[:1] if rounds else ()), *(t for each in rounds for t in each.emitted)]
    return {
        "text": session.detokenize(ids).decode("utf-8", "ignore"),
        "prompt_tokens": len(prompt),
        "chat": templated,
        "seed": seed,
        "speculation": session.speculation,
        "chains_because": session.chains_because,
        "rounds": [as_dict(each, lambda token: spelling(session, token)) for each in rounds],
    }


def as_dict(round_: Round, spell: Spell) -> dict[str, Any]:
    """Return a round, ready for JSON; `nodes` are in the order of their rows."""
    tree, accepted = round_.tree, set(round_.accepted)

    def named(token: int) -> dict[str, Any]:
        return {"token": token, "text": spell(token).decode("utf-8", "backslashreplace")}

    shared = zip(tree.tokens, tree.parents, tree.depths, probabilities(round_), strict=True)
    nodes = [
        {
            **named(token),
            "parent": parent,
            "depth": depth,
            "probability": probability,
            "accepted": i in accepted,
        }
        for i, (token, parent, depth, probability) in enumerate(shared)
    ]
    return {
        "rows": round_.rows,
        "drafted": len(tree) - 1,
        "accepted": len(accepted),
        "nodes": nodes,
        "bonus": None if round_.bonus is None else named(round_.bonus),
        "emitted": round_.emitted,
    }
