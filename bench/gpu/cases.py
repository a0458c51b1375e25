"""A case of the GPU benchmark: a file of bench/cases, its fields and limits. Knows no model, no process.

Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from draftwood.errors import OptionError
from draftwood.options import MAX_DRAFT_TOKENS

from bench.gpu.schedule import Rates, accepted, geometric, mean_length

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parents[1] / "cases"
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temp": 0.0},
    "default": {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
"""Arguments of llama-cpp-python's samplers; "default" are its own defaults."""
_CHOICES = {
    "cache": ("F16", "Q8_0"),
    "guess": ("default", "on", "off"),
    "drafter": ("none", "mtp", "dflash", "given"),
    "shape": ("chain", "tree"),
    "sampler": tuple(SAMPLING),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured. Nodes count the newest token: a chain of n nodes has n - 1 drafts."""

    name: str = ""
    model: str = "35b-a3b"
    drafter: str = "mtp"
    """ "given": drafts that cost nothing, pieces of the model's text; "none": plain decode."""
    nodes: int = 1
    shape: str = "chain"
    depth: int = 0
    """Longest path of a tree, in drafts; 0: nodes - 1."""
    auto: bool = False
    """Let speculation="auto" choose how much to draft, `nodes` at most."""
    length: float = 1.0
    """Mean tokens of a round, each position accepted with the same chance; or:"""
    rates: Rates = ()
    """How often a round keeps at least 1, 2, ... drafts."""
    draft_vocab: int = 0
    """Tokens that drafts are chosen from; 0: as without the option."""
    sampler: str = "greedy"
    prompt: int = 960
    """Tokens; the default lets each segment of the headline cases cross 1,024 positions."""
    rounds: int = 128
    """Rounds of a timed segment; plain decode takes as many steps."""
    repeats: int = 4
    part_rounds: int = 64
    """Rounds whose drafts and forward passes are timed one by one, `rounds` at most."""
    warm: int = 8
    """Rounds before each segment's clock starts."""
    restarts: int = 2
    stock: bool = True
    """Measure llama-server's chain of as many nodes beside it."""
    threads: int = 0
    """CPU threads; 0: llama.cpp's choice."""
    n_gpu_layers: int = -1
    experts: float = 1.0
    """Part of the experts' bytes that the card may hold; 1: all, without a pool. llama-server then keeps the
    experts of as many layers in host memory (--n-cpu-moe)."""
    cache: str = "F16"
    """Type of keys and values, of llama-server's as well."""
    guess: str = "default"
    """Whether experts are fetched before their router has chosen: "on", "off", or as without expert_guess."""
    waiting: bool = False
    """Measure plain decode whose steps wait (DRAFTWOOD_QUEUE_STEPS=0) beside the usual one."""
    clients: int = 0
    """Clients at once of llama-servers with as many slots, ours and stock's; 0: one, of stock's alone."""
    seed: int = 1

    @property
    def asked(self) -> dict[str, Any]:
        """The fields, as JSON gives them back."""
        return {**asdict(self), "rates": list(self.rates)}

    @property
    def drafts(self) -> int:
        """How many drafts the longest path of a round has."""
        if self.drafter == "none":
            return 0
        return (self.depth or self.nodes - 1) if self.shape == "tree" else self.nodes - 1

    @property
    def schedule(self) -> Rates:
        """How often a round of ours keeps at least 1, 2, ... drafts."""
        return self.rates or geometric(self.length, self.drafts)

    @property
    def stock_schedule(self) -> Rates:
        """The same for llama-server's chain of nodes - 1 drafts."""
        n_drafts = self.nodes - 1
        if not self.rates:
            return geometric(self.length, n_drafts)
        return (*self.rates, *[self.rates[-1]] * n_drafts)[:n_drafts]

    @property
    def n_ctx(self) -> int:
        """Positions that the longest segment takes, its last draft included."""
        text = sum(n + 1 for n in accepted(self.schedule, self.rounds, self.seed))
        return self.prompt + max(text, self.rounds) + (self.warm + 1) * self.nodes + 64

    def prompt_of(self, n_vocab: int, seed: int, client: int = 0) -> list[int]:
        """Return i32[prompt]: random tokens, the same for all sides; a client has its own.

        seed: of the turn. It counts where experts come and go: a text that was seen has its own in the slots.
        """
        draw = random.Random((seed if self.experts < 1.0 else self.seed) + 1_000_003 * client)
        return [draw.randrange(n_vocab) for _ in range(self.prompt)]


def read(folder: Path = FOLDER, settings: Sequence[str] = (), model: str | None = None) -> dict[str, Case]:
    """Return the cases of a folder's *.toml by name, changed by "field=value" settings and another model.

    Errors: OptionError for unknown fields, wrong types and what cannot be measured.
    """
    changes = dict(_setting(text) for text in settings) | ({} if model is None else {"model": model})
    cases = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise _wrong(f"{path.name} is no TOML: {error}") from error
        case = _made(path.name, found)
        cases[path.stem] = check(replace(case, name=path.stem, **changes))
    return cases


def check(case: Case) -> Case:
    """Return the case. Errors: OptionError where its fields make no sense together."""
    for name, allowed in _CHOICES.items():
        if getattr(case, name) not in allowed:
            raise _wrong(f"{case.name}: {name} is {getattr(case, name)!r}; expected one of {allowed}")
    least = {"prompt": 2, "rounds": 1, "repeats": 1, "restarts": 1, "part_rounds": 1, "warm": 1}
    for name, value in least.items():
        if getattr(case, name) < value:
            raise _wrong(f"{case.name}: {name} is {getattr(case, name)}; expected {value} or more")
    if not (1 if case.drafter == "none" else 2) <= case.nodes <= MAX_DRAFT_TOKENS + 1:
        raise _wrong(f"{case.name}: found {case.nodes} nodes with drafter {case.drafter!r}; expected 2 to 64")
    if case.drafts >= case.nodes:
        raise _wrong(f"{case.name}: depth is {case.depth}; expected less than {case.nodes} nodes")
    if case.auto and case.drafter not in ("mtp", "dflash"):
        raise _wrong(f"{case.name}: found auto with drafter {case.drafter!r}; expected mtp or dflash")
    if not 0.0 <= case.experts <= 1.0:
        raise _wrong(f"{case.name}: experts is {case.experts}; expected a part, 0 to 1")
    _check_clients(case)
    try:
        rates = case.schedule
    except OptionError as error:
        raise _wrong(f"{case.name}: {error.message}") from error
    if (
        len(rates) != case.drafts
        or list(rates) != sorted(rates, reverse=True)
        or not all(0 <= r <= 1 for r in rates)
    ):
        raise _wrong(
            f"{case.name}: rates are {rates}; expected {case.drafts} chances, none larger than the last"
        )
    if case.rates and case.length not in (1.0, round(mean_length(case.rates), 3)):
        raise _wrong(f"{case.name}: found length beside rates; expected one of them")
    return case


def _check_clients(case: Case) -> None:
    if not 0 <= case.clients <= 64:
        raise _wrong(f"{case.name}: clients is {case.clients}; expected 0 to 64")
    scheduled = case.drafter in ("mtp", "dflash") and case.shape == "chain" and not case.auto
    if case.clients and (not scheduled or case.experts < 1.0):
        raise _wrong(f"{case.name}: found clients beside auto, a tree or a pool; expected chains")


def _wrong(message: str) -> OptionError:
    return OptionError(message, hint="change the case's file in bench/cases, or leave that --set out")


def _made(name: str, found: dict[str, Any]) -> Case:
    hints = get_type_hints(Case)
    for field, value in found.items():
        kind = {Rates: list, float: (int, float)}.get(hints.get(field), hints.get(field))
        if field == "name" or kind is None or not isinstance(value, kind):
            known = ", ".join(each.name for each in fields(Case) if each.name != "name")
            raise _wrong(f"{name}: found {field} = {value!r}; expected of its type one of {known}")
    return Case(**{**found, "rates": tuple(found.get("rates", ()))})


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    kind = get_type_hints(Case).get(name)
    try:
        if not sign or name == "name" or kind not in (bool, int, float, str):
            raise ValueError
        return name, value in ("1", "true") if kind is bool else kind(value)
    except ValueError:
        raise OptionError(
            f"found --set {text}; expected FIELD=VALUE of a case", hint="--set rounds=8"
        ) from None
