"""What completion, chat and streaming cost a token over `generate`, beside llama-cpp-python's own methods.

    python bench/api_cost.py [--lengths 250 1000 8000] [--repeats 5] [--whole 250 1000] [--report FILE]

Two measurements. "alone": `generate` replays recorded tokens of tiny-moe, so that only the API's own work is
timed, which a loaded machine disturbs least. "whole": the model runs, and the cost is the difference to
`generate` in the same repeat. Ours and upstream's run in turn within each repeat; medians. Upstream's methods
are those of draftwood._llama_cpp, unbound, with upstream's detokenizer. Writes one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaModel
from draftwood.generate.generation import Base

import models

LIMIT_MS = 0.15
SLOW = 1000  # tokens; upstream runs once beyond, for it takes minutes
N_CTX = 8448
CHAT = [{"role": "user", "content": "Write a long story about a lighthouse."}]
PROMPT = "The lighthouse stood"


class Endless(Llama):
    """Never ends: a token that would is handed out as a dash. With `tape`, replays it without the model."""

    tape: list[int] | None = None

    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Iterator[int]:  # type: ignore[override]
        """Yield tokens for ever."""
        if self.tape is not None:
            self.n_tokens = len(tokens)
            yield from self.tape
            return
        dash = self.tokenize(b"-", add_bos=False)[0]
        for token in super().generate(tokens, *args, **kwargs):
            yield dash if native.llama_vocab_is_eog(self._model.vocab, token) else token


class Upstream(Endless):
    """The same with llama-cpp-python's own completion and detokenizer."""

    _create_completion = Base._create_completion
    create_chat_completion = Base.create_chat_completion


def make(kind: type[Endless], speculation: str) -> Endless:
    """Load tiny-moe on one thread: the API is Python, and threads that spin for others would be timed too."""
    llm = kind(
        str(models.tiny_moe("F16")),
        n_ctx=N_CTX,
        speculation=speculation,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
    )
    if kind is Upstream:
        llm._model.detokenize = lambda tokens, special=False: LlamaModel.detokenize(
            llm._model, tokens, special
        )
    return llm


def calls(n: int) -> dict[str, Callable[[Endless], int]]:
    """Return each way to get n tokens; the call returns how many came."""

    def generate(llm: Endless) -> int:
        tokens = llm.tokenize(PROMPT.encode(), add_bos=False)
        return sum(1 for _ in islice(llm.generate(tokens, temp=0.0), n))

    def completion(llm: Endless) -> int:
        done: Any = llm.create_completion(PROMPT, max_tokens=n, temperature=0.0, stop=["\0never\0"])
        return int(done["usage"]["completion_tokens"])

    def stream(llm: Endless) -> int:
        chunks = llm.create_completion(PROMPT, max_tokens=n, temperature=0.0, stop=["\0never\0"], stream=True)
        return sum(1 for _ in chunks)

    def chat(llm: Endless) -> int:
        done: Any = llm.create_chat_completion(CHAT, max_tokens=n, temperature=0.0)
        return int(done["usage"]["completion_tokens"])

    def chat_stream(llm: Endless) -> int:
        return sum(1 for _ in llm.create_chat_completion(CHAT, max_tokens=n, temperature=0.0, stream=True))

    return {
        "generate": generate,
        "completion": completion,
        "stream": stream,
        "chat": chat,
        "chat stream": chat_stream,
    }


def timed(call: Callable[[Endless], int], llm: Endless, n: int) -> float:
    """Return milliseconds a token."""
    llm.reset()
    began = time.perf_counter()
    came = call(llm)
    took = time.perf_counter() - began
    assert came >= 0.9 * n, f"{came} of {n} tokens came"  # incomplete characters share a chunk
    return 1e3 * took / n


def measure(llms: dict[str, Endless], n: int, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return {whose: {call: {"ms", "over_generate_ms"}}}, medians of interleaved repeats."""
    ways = calls(n)
    times: dict[str, dict[str, list[float]]] = {who: {way: [] for way in ways} for who in llms}
    for repeat in range(repeats):
        for way, call in ways.items():
            for who in sorted(llms, reverse=bool(repeat % 2)):
                if who == "upstream" and repeat and n > SLOW:
                    continue
                times[who][way].append(timed(call, llms[who], n))
    return {
        who: {way: _summary(ts, by_way["generate"]) for way, ts in by_way.items()}
        for who, by_way in times.items()
    }


def _summary(times: list[float], base: list[float]) -> dict[str, float]:
    over = [a - b for a, b in zip(times, base, strict=False)]
    return {"ms": statistics.median(times), "over_generate_ms": statistics.median(over)}


def record(llm: Endless, n: int) -> list[int]:
    """Return n tokens: what tiny-moe writes, over and over."""
    tokens = llm.tokenize(PROMPT.encode(), add_bos=False)
    written = list(islice(llm.generate(tokens, temp=0.8), min(n, 500)))
    return [written[i % len(written)] for i in range(n)]


def show(title: str, results: dict[int, Any]) -> None:
    """Print one table: milliseconds a token over `generate`."""
    print(f"\n{title}: ms a token over generate (generate itself: ms a token)")
    names = list(calls(1))
    print(f"{'tokens':>7} {'':9}" + "".join(f"{name:>13}" for name in names))
    for n, by_who in results.items():
        for who, by_way in by_who.items():
            cells = [by_way[name]["ms" if name == "generate" else "over_generate_ms"] for name in names]
            print(f"{n:7} {who:9}" + "".join(f"{cell:13.4f}" for cell in cells))


def main() -> int:
    """Measure, print, write; exit status 1 if ours costs more than the limit in "alone"."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 1000, 8000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--whole", type=int, nargs="*", default=[250, 1000], help="lengths with the model at work"
    )
    parser.add_argument("--speculation", default="mtp")
    parser.add_argument("--report", type=Path, default=models.ROOT / "build" / "api_cost.json")
    args = parser.parse_args()

    llms = {"draftwood": make(Endless, args.speculation), "upstream": make(Upstream, args.speculation)}
    whole = {n: measure(llms, n, args.repeats) for n in args.whole}
    tape = record(llms["draftwood"], max(args.lengths) + 64)
    for llm in llms.values():
        llm.tape = tape
    alone = {n: measure(llms, n, args.repeats) for n in args.lengths}
    show("alone", alone)
    if whole:
        show("whole", whole)
    ours = [by["over_generate_ms"] for by_who in alone.values() for by in by_who["draftwood"].values()]
    report = {
        "alone": alone,
        "whole": whole,
        "limit_ms": LIMIT_MS,
        "worst_ms": max(ours),
        "repeats": args.repeats,
    }
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"worst_ms": round(max(ours), 4), "limit_ms": LIMIT_MS, "report": str(args.report)}))
    return int(max(ours) > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
