"""`draftwood experts`: what a card holds of a model's experts by its memory, and which ones were used.

Reads the header of a GGUF and heat files; loads no model. Must not know: pools.
Test: tests/model/test_cli_experts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from draftwood.cli import shared
from draftwood.cli.failure import library_needed
from draftwood.errors import OptionError

_CARD = "card"  # any: a plan is made where there need be none
_SIZES = ("6GiB", "8GiB", "12GiB", "16GiB", "24GiB")


@click.group("experts", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Plan a mixture of experts that is larger than the card."""


@command.command("plan")
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("--vram", "sizes", multiple=True, default=_SIZES, show_default=True, metavar="SIZE",
              help="Bytes of the card for everything. May be repeated.")  # fmt: skip
@click.option("--n-ctx", type=click.IntRange(min=1), default=4096, show_default=True, help="Context size.")
@shared.expert_heat
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(model: str, sizes: tuple[str, ...], n_ctx: int, expert_heat: str | None, as_json: bool) -> None:
    """Show which part of MODEL's experts a card holds, for cards of several sizes.

    With a heat file also how many of the uses that it counts fell on the experts that would be held: experts
    that come and go do better than that.
    """
    with library_needed():
        from draftwood.load import experts, files

    info = files.checked_model(model)
    experts.require_experts(info)
    heat = experts.read_heat(expert_heat, info)
    rest = experts.beside(info, {"n_ctx": n_ctx})

    def row(size: str) -> dict[str, Any]:
        n_bytes = experts.to_bytes(size, "vram")
        left = n_bytes - rest
        if left >= info.expert_bytes:
            held = info.n_experts
        else:
            held = experts.fitting(info, left, _CARD).slots if left >= 0 else 0
        uses = _uses(heat, held) if heat else None
        return {"vram": n_bytes, "fits": left >= 0, "slots": held, "experts": info.n_experts, "uses": uses}

    facts = {"layers": info.n_expert_layers, "experts": info.n_experts, "expert_bytes": info.expert_bytes,
             "beside": rest, "n_ctx": n_ctx, "plan": [row(size) for size in sizes]}  # fmt: skip
    click.echo(json.dumps(facts) if as_json else _described(facts))


def _uses(heat: dict[int, list[int]], held: int) -> float:
    """Return which part of the counted uses the `held` most used experts of each layer have."""
    top = sum(sum(sorted(values, reverse=True)[:held]) for values in heat.values())
    return top / max(1, sum(map(sum, heat.values())))


def _described(facts: dict[str, Any]) -> str:
    from draftwood.load.experts import gib

    lines = [
        f"{facts['layers']} layers of {facts['experts']} experts, {gib(facts['expert_bytes'])}; the rest "
        f"takes about {gib(facts['beside'])} with n_ctx={facts['n_ctx']}",
        f"{'vram':>10}  {'experts on the card':>20}  of each layer",
    ]
    for row in facts["plan"]:
        part = row["slots"] / facts["experts"] if facts["experts"] else 0.0
        uses = "" if row["uses"] is None else f", {row['uses']:.0%} of the uses counted"
        words = f"{row['slots']} of {facts['experts']}{uses}" if row["fits"] else "too small for the rest"
        lines.append(f"{gib(row['vram']):>10}  {part:>20.0%}  {words}")
    return "\n".join(lines)


@command.command("heat")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw it into this PNG (needs draftwood[bench]).")  # fmt: skip
def heat(file: Path, plot: Path | None) -> None:
    """Show how a heat file's uses spread over the experts, layer by layer."""
    with library_needed():
        from draftwood.bench.plot import check_available
        from draftwood.load.experts import parse_heat

    if plot is not None:
        check_available("--plot")
    layers = parse_heat(file)
    if layers is None:
        raise OptionError(
            f"{file} is no heat file; expected one",
            hint="expert_heat= of Llama, or --expert-heat, writes one",
        )
    click.echo("layer  experts used  most used half has")
    for layer, values in sorted(layers.items()):
        used = sum(value > 0 for value in values)
        click.echo(
            f"{layer:5d}  {used:5d} of {len(values):<4d}  {_uses({layer: values}, len(values) // 2):>18.0%}"
        )
    if plot is not None:
        _draw(plot, layers)


def _draw(path: Path, layers: dict[int, list[int]]) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas: Any = Canvas(figsize=(9.0, 1.5 + 0.12 * len(layers)), layout="constrained")
    axis = canvas.subplots()
    numbers = sorted(layers)
    image = axis.imshow(
        [layers[layer] for layer in numbers], aspect="auto", cmap="viridis", interpolation="none"
    )
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
    axis.set_yticks(range(0, len(numbers), max(1, len(numbers) // 10)))
    axis.set_yticklabels([str(numbers[i]) for i in range(0, len(numbers), max(1, len(numbers) // 10))])
    canvas.colorbar(image, label="uses of late, in 1/256")
    canvas.savefig(path, format="png", dpi=130)
