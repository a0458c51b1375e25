"""One process of bench/stock_cpu.py: `python bench/stock_worker.py SIDE MODEL N_CTX`.

Takes a turn per line of stdin, {"prompt": ids, "tokens": n}. Answers with a line: seconds of the prompt,
seconds of n tokens behind it, and the tokens. Runs where only the measured package is installed. Must not
know: what is compared.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from typing import Any

STOCK = "stock"


def load(side: str, model: str, n_ctx: int) -> Any:
    """Return the model in the package of that side, at its defaults: "stock", or a value of speculation=."""
    if side != STOCK:
        from draftwood import Llama

        return Llama(model, n_ctx=n_ctx, verbose=False, speculation=side)
    import llama_cpp

    if "draftwood" in str(llama_cpp.__file__) or "draftwood" in sys.modules:
        raise SystemExit(f"{llama_cpp.__file__} is draftwood; expected llama-cpp-python's own package")
    return llama_cpp.Llama(model, n_ctx=n_ctx, verbose=False)


def main(side: str, model: str, n_ctx: str) -> None:
    """Answer until stdin ends."""
    llm = load(side, model, int(n_ctx))
    for line in sys.stdin:
        turn = json.loads(line)
        llm.reset()
        stream = llm.generate(turn["prompt"], temp=0.0)
        begin = time.perf_counter()
        tokens = [next(stream)]
        first = time.perf_counter()
        tokens += islice(stream, turn["tokens"])
        end = time.perf_counter()
        stream.close()
        print(json.dumps({"prompt": first - begin, "decode": end - first, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
