"""`draftwood experts`: what a card holds of a model's experts by its memory, and which ones were used.

`plan` reads the header of a GGUF, `heat` a heat file; `show` loads the model and writes a text.
Test: tests/model/test_cli_experts.py.
"""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import click

from draftwood.cli import shared
from draftwood.cli.failure import library_needed
from draftwood.errors import OptionError

_CARD = "card"  # any: a plan is made where there need be none
_PROMPT = "What experts does a model choose while it writes?"
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
@click.option("--measure", is_flag=True,
              help="Load the model twice, write a text, and predict the speed of each size.")  # fmt: skip
@click.option("--prompt", help=f"Of the text that --measure writes. Default: {_PROMPT!r}.")
@click.option("-n", "--tokens", type=click.IntRange(min=16), help="That --measure writes. Default: 128.")
@click.option("--n-gpu-layers", type=click.IntRange(min=-1),
              help="Of --measure: layers on the card. Default: all if there is one.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(model: str, sizes: tuple[str, ...], n_ctx: int, expert_heat: str | None, measure: bool,
         prompt: str | None, tokens: int | None, n_gpu_layers: int | None,
         as_json: bool) -> None:  # fmt: skip
    """Show which part of MODEL's experts a card holds, for cards of several sizes.

    With a heat file also how many of the uses that it counts fell on the experts that would be held: experts
    that come and go do better than that. With --measure also hits and speed of plain decode without guesses:
    two pools, which begin with the first experts, are timed on this machine, and what the text chose is
    replayed for the others.
    """
    for option, value in (("--prompt", prompt), ("--tokens", tokens), ("--n-gpu-layers", n_gpu_layers)):
        if value is not None and not measure:
            raise click.UsageError(f"found {option} without --measure, which it is for")
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

    rows = [row(size) for size in sizes]
    facts = {"layers": info.n_expert_layers, "experts": info.n_experts, "expert_bytes": info.expert_bytes,
             "experts_used": info.n_experts_used, "beside": rest, "n_ctx": n_ctx, "plan": rows}  # fmt: skip
    if measure:
        text = (_PROMPT if prompt is None else prompt).encode()
        facts["measured"] = _measured(model, facts, text, tokens or 128, n_gpu_layers)
    click.echo(json.dumps(facts) if as_json else _described(facts))


def _measured(
    model: str, facts: dict[str, Any], prompt: bytes, n_tokens: int, n_gpu_layers: int | None
) -> dict[str, Any]:
    """Add hits and speeds to the rows of the plan; return what was timed, and where."""
    from draftwood.bench import expert_plan
    from draftwood.load.devices import cards, describe

    found = [describe(card) for card in cards()]
    layers = n_gpu_layers if n_gpu_layers is not None else -1 if found else 0
    card = found[0] if found and layers != 0 else None
    pools = _pools(facts, card)
    expert_plan.check_room(model, prompt, n_tokens, facts["n_ctx"])
    settings = {"n_ctx": facts["n_ctx"], "n_gpu_layers": layers}
    text, times = expert_plan.measure(model, pools, prompt, n_tokens, **settings)
    costs = expert_plan.fit(text, times)
    for row in facts["plan"]:
        row |= expert_plan.row(text, costs, row["slots"]) if row["fits"] else {}
    return {
        "device": card["description"] if card else "CPU",
        "n_gpu_layers": layers,
        "timed": [{"slots": slots, "token_ms": ms} for slots, ms in times],
        "step_ms": costs.step_ms if costs else None,
        "miss_ms": costs.miss_ms if costs else None,
    }


def _pools(facts: dict[str, Any], card: dict[str, Any] | None) -> tuple[int, int]:
    """Return the bytes of two pools: the largest of the plan that is free on the card, and the smallest."""
    one = facts["expert_bytes"] // facts["experts"]
    room = facts["expert_bytes"] - one if card is None else card["memory_free"] - facts["beside"]
    wanted = [row["vram"] - facts["beside"] for row in facts["plan"] if row["fits"]]
    pools = [min(n_bytes, room, facts["expert_bytes"] - one) for n_bytes in wanted]
    large = max(pools, default=0)
    small = min((n_bytes for n_bytes in pools if n_bytes // one < large // one), default=large // 2)
    if small // one < facts["experts_used"]:
        small = facts["experts_used"] * one
    if large // one <= small // one:
        least = facts["beside"] + (facts["experts_used"] + 1) * one
        most = f", and {room + facts['beside']} are free on the card" if card else ""
        raise OptionError(
            f"found no --vram with room for more than a token's experts; expected {least} bytes or more"
            f"{most}",
            hint=f"--vram {-(-least // 2**20)}MiB",
        )
    return small, large


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
        if "hit_rate_without_guesses" in row:
            hits, missed = row["hit_rate_without_guesses"], row["bytes_missed_a_token"] / 1e6
            words += f": {hits:.0%} hits, {missed:.1f} MB a token"
        if "token_ms" in row:
            speed = float(f"{row['tokens_per_second']:.2g}")  # two digits
            words += f", about {speed:g} tok/s"
        lines.append(f"{gib(row['vram']):>10}  {part:>20.0%}  {words}")
    if measured := facts.get("measured"):
        lines.append(_of_measuring(measured))
    return "\n".join(lines)


def _of_measuring(measured: dict[str, Any]) -> str:
    runs = [f"{each['token_ms']:.2f} ms with {each['slots']} slots" for each in measured["timed"]]
    timed = " and ".join(runs)
    words = f"timed on {measured['device']}, without guesses: {timed} a layer"
    return words if measured["step_ms"] else f"{words}: too close to predict speeds"


@command.command("show")
@click.argument("model", type=click.Path(dir_okay=False))
@click.argument("prompt", default=_PROMPT)
@shared.n_gpu_layers
@shared.vram
@shared.expert_vram
@shared.expert_heat
@click.option("-n", "--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="To write.")
@click.option("--n-ctx", type=click.IntRange(min=1), default=4096, show_default=True, help="Context size.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, prompt: str, n_gpu_layers: int, vram: str | None, expert_vram: str | None,
         expert_heat: str | None, tokens: int, n_ctx: int, as_json: bool) -> None:  # fmt: skip
    """Write a text behind PROMPT with MODEL's experts in a pool; show each layer's hits."""
    with library_needed():
        from draftwood import Llama

    sizes: dict[str, Any] = {"vram": vram, "expert_vram": expert_vram, "expert_heat": expert_heat}
    with closing(Llama(model, n_gpu_layers=n_gpu_layers, n_ctx=n_ctx, verbose=False, **sizes)) as llm:
        facts = _written(llm, prompt, tokens)
    click.echo(json.dumps(facts) if as_json else _shown(facts))


def _written(llm: Any, prompt: str, n_tokens: int) -> dict[str, Any]:
    """Return the pool's counters behind a text, with bytes a token of it and a row a layer."""
    from draftwood.load import experts

    if llm._pool is None:
        raise OptionError(
            "all of the model's experts fit; expected less memory than they take",
            hint="--expert-vram SIZE, or a smaller --vram; draftwood experts plan lists sizes",
        )
    with closing(llm.generate(llm.tokenize(prompt.encode()), temp=0.0)) as text:
        next(text)
        before, steps = llm.expert_stats, sum(1 for _ in islice(text, n_tokens))
    after = llm.expert_stats
    return {
        **after.to_dict(),
        "bytes_missed_a_token": (after.bytes_missed - before.bytes_missed) // max(1, steps),
        "by_layer": {
            number: {"slots": each.slots, "hits": each.hits, "misses": each.misses, "in_place": each.in_place}
            for number, each in experts.pooled(llm._pool, llm._info).items()
        },
    }


def _shown(facts: dict[str, Any]) -> str:
    lines = ["layer  slots      hits    misses  in place  hit rate"]
    for number, each in facts["by_layer"].items():
        asked = each["hits"] + each["misses"] + each["in_place"]
        rate = each["hits"] / asked if asked else 0.0
        lines.append(f"{number:5d}  {each['slots']:5d}  {each['hits']:8d}  {each['misses']:8d}  "
                     f"{each['in_place']:8d}  {rate:8.0%}")  # fmt: skip
    lines.append(
        f"all layers: hit rate {facts['hit_rate']:.1%}, prompt included; "
        f"{facts['bytes_missed_a_token'] / 1e6:.2f} MB copied a token behind it; "
        f"{facts['right']} of {facts['guessed']} guesses were right"
    )
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
