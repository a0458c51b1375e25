"""Send random requests to a model over a pool of experts: text right, memory flat, nothing lost.

    python bench/expert_soak.py [--minutes 30] [--seed 1] [--kind F16|Q8_0|Q4_K_M] [--n-gpu-layers 0]

Requests have random held-out prompts, lengths, samplings and seeds. Some are cancelled after a few tokens,
some end in an exception of their logits processor, and of some two run at once: the second in a context of
its own on the same model, with an engine of its own, a token here and a token there. Each text is held
against that of the model in one memory, decoded plainly. After some requests the model is loaded anew, with
another number of slots and another way of drafting.

Memory is read each time a model was freed. Flat: the most of the last third is not over the
most of the second third by more than 32 MiB, and as many files are open in the end as after the first load.
The last line is one JSON object, also added to --results; exit status 1 for a wrong text or growing memory.
On a card rows of fused layers have the bits of one, up to 16: prompts are as long, and drafts are made.
Q4_K_M of tiny-moe has types that are not fused: there prompts have up to 8 tokens, and nothing is drafted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.bench import results as rows_of_results
from draftwood.engine import _capi
from draftwood.engine.engine import Engine, probe_model

ROOT = Path(__file__).resolve().parents[1]
for _folder in (str(ROOT), str(ROOT / "bench")):  # with PYTHONSAFEPATH, tools/gpu.sh's, neither is there
    if _folder not in sys.path:
        sys.path.append(_folder)  # last: what lies there must not shadow what is installed
from same_text import SAMPLING  # noqa: E402

import models  # noqa: E402
from bench.gpu.stamp import origin  # noqa: E402

SCHEMA = 1
N_CTX = 512
REQUESTS_OF_A_LOAD = 40
SLACK = 32 << 20  # bytes: the allocator's
FUSED_ON_CARDS = ("F16", "Q8_0")
WAYS: tuple[dict[str, Any], ...] = (
    {"speculation": "off"},
    {"speculation": "mtp", "draft_tokens": 4},
    {"speculation": "tree", "tree_budget": 8},
    {"speculation": "ngram"},
    {"speculation": "auto", "draft_tokens": 7},
)


class CancelledError(Exception):
    """What a logits processor of a request throws."""


@dataclass(slots=True)
class Request:
    """A request, as drawn."""

    prompt: list[int]
    sampling: dict[str, Any]
    seed: int
    n_tokens: int

    def stream(self, llm: Llama, **more: Any) -> Iterator[int]:
        """Begin it on a Llama."""
        llm.reset()
        llm.set_seed(self.seed)
        return llm.generate(self.prompt, **self.sampling, **more)

    def text(self, llm: Llama) -> list[int]:
        """Return its whole text."""
        with contextlib.closing(self.stream(llm)) as tokens:  # type: ignore[type-var]
            return list(islice(tokens, self.n_tokens))


class Beside:
    """A second context on a Llama's model, with an engine of its own, greedy."""

    def __init__(self, llm: Llama, drafter: int) -> None:
        params = native.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_batch = params.n_ubatch = 128
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = llm.context_params.flash_attn_type  # it rounds otherwise
        self._model = llm.model
        self._ctx = native.llama_init_from_model(self._model, params)
        if self._ctx is None:
            raise SystemExit("no second context could be made")
        self._engine = Engine(
            self._ctx, params, drafter=drafter, draft_tokens=4, draft_p_min=0.0, exact_rows=1 << 30
        )
        self._greedy = native.llama_sampler_init_greedy()

    def tokens(self, prompt: list[int]) -> Iterator[int]:
        """Generate behind a prompt of at most 128 tokens."""
        self._engine.reset()
        self._engine.eval(prompt, 0)
        last = self._engine.next(self._greedy)
        yield last
        while True:
            self._engine.propose(last)
            self._engine.verify()
            while self._engine.row() is not None:
                last = self._engine.next(self._greedy)
                yield last
            self._engine.commit()

    def close(self) -> None:
        """Free it, before its model."""
        self._engine.close()
        native.llama_sampler_free(self._greedy)
        native.llama_free(self._ctx)


@dataclass(slots=True)
class Found:
    """What happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds, resident bytes."""
    files: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def check(self, kind: str, found: list[int], expected: list[int]) -> None:
        """Count a text of this kind and its tokens."""
        self.counts[kind] += 1
        self.counts["tokens"] += len(found)
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            at = next((i for i, (mine, theirs) in pairs if mine != theirs), -1)
            self.wrong.append(f"{kind}: token {at} of {len(found)} (expected {len(expected)}) differs")

    def look(self, seconds: float) -> None:
        """Read the process's memory and open files."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append((seconds, pages * resource.getpagesize()))
        self.files.append(len(os.listdir("/proc/self/fd")))

    def faults(self, seconds: float) -> list[str]:
        """Return what is wrong, in words."""
        faults = list(self.wrong)
        middle = [n for at, n in self.memory if seconds / 3 <= at < seconds * 2 / 3]
        last = [n for at, n in self.memory if at >= seconds * 2 / 3]
        if not middle or not last:
            faults.append("too few loads to say whether memory is flat: more --minutes")
        elif max(last) > max(middle) + SLACK:
            faults.append(f"memory grew from {max(middle) >> 20} to {max(last) >> 20} MiB")
        if self.files and self.files[-1] > self.files[0]:
            faults.append(f"{self.files[-1]} open files; {self.files[0]} after the first load")
        return faults


class Soak:
    """The model in one memory, the same over a pool, and requests drawn for both."""

    def __init__(self, kind: str, seed: int, n_gpu_layers: int) -> None:
        self._path = models.tiny_moe(kind)
        self._info = probe_model(str(self._path))
        self._dice = random.Random(seed)
        on_cpu, fused = n_gpu_layers == 0, kind in FUSED_ON_CARDS
        self._drafts = on_cpu or fused
        self._longest_prompt = 300 if on_cpu else 16 if fused else 8
        self._common = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        self._common["n_gpu_layers"] = n_gpu_layers
        self.plain = Llama(str(self._path), speculation="off", **self._common)
        self._prompts = [ids for _, ids in models.heldout_prompts(self.plain, 8, 300)]
        self.found = Found()

    def pooled(self) -> Llama:
        """Load the model over a pool of any size that it may have."""
        info, dice = self._info, self._dice
        slots = dice.randint(info.n_experts_used, info.n_experts - 1)
        n_bytes = -(-slots * info.expert_bytes // info.n_experts)
        guess = dice.random() < 0.5
        way = dice.choice(WAYS) if self._drafts else WAYS[0]
        llm = Llama(str(self._path), expert_vram=n_bytes, expert_guess=guess, **way, **self._common)
        stats, layers = llm.expert_stats, info.n_expert_layers
        # on a card copies ahead take a part of the bytes
        if stats is None or not info.n_experts_used * layers <= stats.slots <= slots * layers:
            raise SystemExit(f"found {stats}; expected up to {slots} slots a layer")
        return llm

    def request(self) -> Request:
        """Draw one."""
        dice = self._dice
        text = dice.choice(self._prompts)
        begin = dice.randrange(len(text) - 1)
        prompt = text[begin : begin + dice.randint(1, self._longest_prompt)]
        n_tokens = dice.randint(1, min(96, N_CTX - len(prompt) - 8))
        return Request(prompt, dice.choice(list(SAMPLING.values())), dice.randrange(1 << 31), n_tokens)

    def run_load(self, ends: float) -> None:
        """Load a model, send it requests, and free it."""
        llm = self.pooled()
        drafter = _capi.DRAFTER_MTP if llm.speculation == "mtp" else _capi.DRAFTER_NGRAM
        beside = None
        if self._dice.random() < 0.5:
            beside = Beside(llm, drafter if self._drafts else _capi.DRAFTER_NONE)
        for _ in range(REQUESTS_OF_A_LOAD):
            if time.monotonic() >= ends:
                break
            self._one(llm, beside)
        stats = llm.expert_stats
        assert stats is not None
        self.found.counts["misses"] += stats.misses
        self.found.counts["guessed"] += stats.guessed
        self.found.counts["drafted"] += llm.speculation_stats.drafted
        self.found.counts["loads"] += 1
        if beside is not None:
            beside.close()
        llm.close()

    def _one(self, llm: Llama, beside: Beside | None) -> None:
        asked, dice = self.request(), self._dice
        expected = asked.text(self.plain)
        kind = dice.choice(("whole", "whole", "cancelled", "failed", "two" if beside else "whole"))
        if kind == "two" and beside is not None:
            self._two(llm, beside, asked, expected)
        elif kind == "cancelled":
            asked.n_tokens = dice.randint(1, asked.n_tokens)
            self.found.check(kind, asked.text(llm), expected[: asked.n_tokens])
        elif kind == "failed":
            self.found.check(kind, *self._failed(llm, asked, expected))
        else:
            self.found.check(kind, asked.text(llm), expected)

    def _failed(self, llm: Llama, asked: Request, expected: list[int]) -> tuple[list[int], list[int]]:
        left = self._dice.randint(1, asked.n_tokens)
        calls = 0

        def processor(_: Any, scores: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > left:
                raise CancelledError
            return scores

        tokens: list[int] = []
        stream = asked.stream(llm, logits_processor=[processor])
        with contextlib.suppress(CancelledError):
            tokens.extend(islice(stream, asked.n_tokens))
        return tokens, expected[:left]

    def _two(self, llm: Llama, beside: Beside, asked: Request, expected: list[int]) -> None:
        other = Request(self.request().prompt[:128], SAMPLING["greedy"], 0, self._dice.randint(1, 64))
        expected_of_other = other.text(self.plain)
        streams = {"two": asked.stream(llm), "beside": beside.tokens(other.prompt)}
        wanted = {"two": expected, "beside": expected_of_other}
        texts: dict[str, list[int]] = {name: [] for name in streams}
        while open_ones := [name for name in streams if len(texts[name]) < len(wanted[name])]:
            name = self._dice.choice(open_ones)
            texts[name].append(next(streams[name]))
        for name, stream in streams.items():
            stream.close()  # type: ignore[attr-defined]
            self.found.check(name, texts[name], wanted[name])


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--kind", type=click.Choice(("F16", *models.QUANTISED)), default="F16", show_default=True)
@click.option("--n-gpu-layers", type=int, default=0, show_default=True)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(minutes: float, seed: int, kind: str, n_gpu_layers: int, results: Path | None) -> None:
    """Run for so many minutes and print the row."""
    if results:
        rows_of_results.check_writable("--results", results)
    machine = origin()  # of what runs: the tree may change meanwhile
    soak = Soak(kind, seed, n_gpu_layers)
    begin = time.monotonic()
    ends = begin + 60 * minutes
    while time.monotonic() < ends:
        soak.run_load(ends)
        soak.found.look(time.monotonic() - begin)
        print(dict(soak.found.counts), f"{soak.found.memory[-1][1] >> 20} MiB", flush=True)
    found = soak.found
    faults = found.faults(time.monotonic() - begin)
    for fault in faults:
        print(fault)
    row = {
        "schema": SCHEMA,
        **machine,
        "model": f"tiny-moe {kind}",
        "minutes": minutes,
        "seed": seed,
        **found.counts,
        "n_gpu_layers": n_gpu_layers,
        "wrong": len(found.wrong),
        "mebibytes": [n >> 20 for _, n in found.memory],
        "faults": faults,
    }
    if results:
        rows_of_results.append(results, row)
    click.echo(json.dumps(row))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
