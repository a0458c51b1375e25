"""`draftwood experts`: what a card holds of a model's experts by its memory, and which ones were used.

`plan` reads the header of a GGUF, `heat` a heat file; `show` loads the model and writes a text.
Test: tests/model/test_cli_experts.py.
"""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import click

from draftwood.cli import llama_flags, shared
from draftwood.cli.failure import Commands, library_needed
from draftwood.cli.inputs import need_text
from draftwood.errors import OptionError

_CARD = "card"  # any: a plan is made where there need be none
_PROMPT = "What experts does a model choose while it writes?"
_SIZES = ("6GiB", "8GiB", "12GiB", "16GiB", "24GiB")


@click.group("experts", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Plan, try and look into a mixture of experts that is larger than the card."""


@command.command("plan", cls=llama_flags.Command)
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("--vram", "sizes", multiple=True, default=_SIZES, show_default=True, metavar="SIZE",
              help="Bytes of the card for everything. May be repeated.")  # fmt: skip
@click.option(
    "--n-ctx", type=click.IntRange(min=1), default=shared.N_CTX, show_default=True, help="Context size."
)
@click.option("--expert-heat", type=click.Path(dir_okay=False), metavar="FILE",
              help="Heat file of MODEL: say which part of its uses slots cover. Only read.")  # fmt: skip
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
    """Show what cards of several sizes hold of MODEL's experts.

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
        from draftwood.load.heat import require

    info = files.checked_model(model)
    experts.require_experts(info)
    heat = require(expert_heat, info)
    layers, card = _measured_on(n_gpu_layers) if measure else (0, None)
    device = experts.CPU if measure and card is None else _CARD
    facts = _planned(info, sizes, n_ctx, device, heat)
    if measure:
        text = (_PROMPT if prompt is None else prompt).encode()
        facts["measured"] = _measured(model, facts, text, tokens or 128, layers, card)
    click.echo(json.dumps(facts) if as_json else _described(facts))


def _planned(
    info: Any, sizes: tuple[str, ...], n_ctx: int, device: str, heat: dict[int, list[int]]
) -> dict[str, Any]:
    """Return what the device would hold, with a row for each size; device: the CPU, or any card."""
    from draftwood.load import experts

    rest = experts.beside(info, {"n_ctx": n_ctx})

    def row(size: str) -> dict[str, Any]:
        n_bytes = experts.to_bytes(size, "vram")
        left = n_bytes - rest
        if left >= info.expert_bytes:
            held = info.n_experts
        else:
            held = experts.fitting(info, left, device).slots if left >= 0 else 0
        uses = _uses(heat, held) if heat else None
        return {"size": size, "vram": n_bytes, "fits": left >= 0, "slots": held, "experts": info.n_experts,
                "uses": uses}  # fmt: skip

    return {"layers": info.n_expert_layers, "experts": info.n_experts, "expert_bytes": info.expert_bytes,
            "experts_used": info.n_experts_used, "beside": rest, "n_ctx": n_ctx, "device": device,
            "plan": [row(size) for size in sizes]}  # fmt: skip


def _measured_on(n_gpu_layers: int | None) -> tuple[int, dict[str, Any] | None]:
    """Return how many layers --measure puts on the card, and the card; None for the CPU."""
    from draftwood.load.devices import cards, describe

    found = [describe(card) for card in cards()]
    layers = n_gpu_layers if n_gpu_layers is not None else -1 if found else 0
    return layers, found[0] if found and layers != 0 else None


def _measured(
    model: str, facts: dict[str, Any], prompt: bytes, n_tokens: int, layers: int, card: dict[str, Any] | None
) -> dict[str, Any]:
    """Add hits and speeds to the rows of the plan; return what was timed, and where."""
    from draftwood.bench import expert_plan
    from draftwood.load.experts import IN_PLAIN_MEMORY

    pools = _pools(facts, card)
    expert_plan.check_room(model, prompt, n_tokens, facts["n_ctx"])
    settings = {"n_ctx": facts["n_ctx"], "n_gpu_layers": layers}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", IN_PLAIN_MEMORY)  # the plan says it
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
        small = -(-facts["experts_used"] * facts["expert_bytes"] // facts["experts"])
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
        f"{'vram':>10}  {'experts in slots':>20}  of each layer",
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
        lines.append(f"{row['size']:>10}  {part:>20.0%}  {words}")
    lines.append(
        "slots are counted for a card; in plain memory prompts need no room, so there are a few more"
        if facts["device"] == _CARD
        else "slots are counted for plain memory, where prompts need no room: a card has a few less"
    )
    if measured := facts.get("measured"):
        lines.append(_of_measuring(measured))
    return "\n".join(lines)


def _of_measuring(measured: dict[str, Any]) -> str:
    runs = [f"{each['token_ms']:.2f} ms with {each['slots']} slots" for each in measured["timed"]]
    timed = " and ".join(runs)
    words = f"timed on {measured['device']}, without guesses: {timed} a layer"
    return words if measured["step_ms"] else f"{words}: too close to predict speeds"


@command.command("show", cls=llama_flags.Command)
@click.argument("model", type=click.Path(dir_okay=False))
@click.argument("prompt", default=_PROMPT)
@shared.n_gpu_layers
@shared.vram
@shared.expert_vram
@shared.expert_heat
@shared.expert_guess
@click.option("-n", "--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="To write.")
@click.option(
    "--n-ctx", type=click.IntRange(min=1), default=shared.N_CTX, show_default=True, help="Context size."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, prompt: str, n_gpu_layers: int, vram: str | None, expert_vram: str | None,
         expert_heat: str | None, expert_guess: bool | None, tokens: int, n_ctx: int,
         as_json: bool) -> None:  # fmt: skip
    """Write a text over a pool and show each layer's hits.

    PROMPT is continued as it stands. The pool has the size of --vram or --expert-vram.
    """
    need_text(prompt)
    with library_needed():
        from draftwood import Llama
        from draftwood.load import experts, files
        from draftwood.load.placement import all_layers

    info = files.checked_model(model)
    experts.require_experts(info)
    if vram is None and expert_vram is None and not all_layers(n_gpu_layers, info):
        raise _no_pool(info, asked_for=False)  # with all layers on a card its size may do
    sizes: dict[str, Any] = {"vram": vram, "expert_vram": expert_vram, "expert_heat": expert_heat,
                             "expert_guess": expert_guess}  # fmt: skip
    with closing(Llama(model, n_gpu_layers=n_gpu_layers, n_ctx=n_ctx, verbose=False, **sizes)) as llm:
        if llm._pool is None:
            raise _no_pool(info, asked_for=vram is not None or expert_vram is not None)
        facts = _written(llm, prompt, tokens)
    click.echo(json.dumps(facts) if as_json else _shown(facts))


def _no_pool(info: Any, *, asked_for: bool) -> OptionError:
    """Say that all experts fit, or that no size was given; the hint has half of them in slots."""
    from draftwood.load.experts import gib

    takes, half = info.expert_bytes, info.expert_bytes // 2
    size = f"{half // 2**20}MiB" if half >= 2**24 else str(half)
    if asked_for:
        found = f"all experts fit: they take {takes} bytes ({gib(takes)}); expected less memory for them"
    else:
        found = "found neither --vram nor --expert-vram; expected one of them"
    return OptionError(found, hint=f"--expert-vram {size}, about half of the experts' bytes")


def _written(llm: Any, prompt: str, n_tokens: int) -> dict[str, Any]:
    """Return the pool's counters after a text, with bytes a token of it and a row a layer."""
    from draftwood.load import experts

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
    words = (
        f"all layers: hit rate {facts['hit_rate']:.1%}, prompt included; "
        f"{facts['bytes_missed_a_token'] / 1e6:.2f} MB copied per token after the prompt"
    )
    if facts["guessed"]:
        words += f"; {facts['right']} of {facts['guessed']} guesses were right"
    lines.append(words)
    return "\n".join(lines)


@command.command("heat")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw it into this PNG (needs draftwood[bench]).")  # fmt: skip
def heat(file: Path, plot: Path | None) -> None:
    """Show which experts a heat file counts, layer by layer."""
    with library_needed():
        from draftwood.bench.plot import check_available
        from draftwood.bench.results import check_writable
        from draftwood.load.heat import parse

    if plot is not None:
        check_writable("--plot", plot)
        check_available("--plot")
    layers = parse(file)
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
