"""Compare draft trees with chains by mean tokens per round, same drafter, on held-out text.

    python bench/trees.py [--prompts N] [--drafter mtp|dflash] [--nodes 8 12 16] [--results FILE]

Counts, no times: they do not depend on the machine. Prompts are 128 held-out tokens, 128 are generated,
rounds inside repeated 16-grams are left out and their share told (draftwood.bench.rounds). The text of each
way must be that of plain decoding. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.bench.facts import machine
from draftwood.bench.results import append
from draftwood.bench.rounds import generate_rounds, mean_tokens
from draftwood.engine.engine import build_info, probe_model

import models

PROMPT, NEW = 128, 128
TEMPERATURES = (0.0, 0.8)
LONGEST_CHAIN = 15
SEED = 11
GAIN = 1.06  # of trees over chains, in tokens a round
SCHEMA = 1


def texts(
    llm: Llama, prompts: Sequence[tuple[str, list[int]]], temperature: float
) -> list[tuple[list[int], Any]]:
    """Generate after every prompt; return ids and rounds of each."""
    out = []
    for _, ids in prompts:
        llm.set_seed(SEED)
        out.append(generate_rounds(llm, ids, NEW, temp=temperature))
    return out


def measure(
    model: Path, prompts: Sequence[tuple[str, list[int]]], plain: dict[float, list[list[int]]], **how: Any
) -> dict[str, Any]:
    """Return tokens per round by temperature of one way of drafting, its text held against plain decoding."""
    llm = Llama(str(model), n_ctx=512, verbose=False, **how)
    row: dict[str, Any] = {"tokens_per_round": {}, "repeat_share": {}}
    for temperature in TEMPERATURES:
        found = texts(llm, prompts, temperature)
        if [ids for ids, _ in found] != plain[temperature]:
            raise SystemExit(f"{how}: another text than plain decoding at temperature {temperature}")
        mean, repeats = mean_tokens(found)
        row["tokens_per_round"][str(temperature)] = mean
        row["repeat_share"][str(temperature)] = repeats
    stats = llm.speculation_stats
    assert stats is not None
    row["nodes"] = round(stats.drafted / stats.rounds + 1, 2)
    llm.close()
    return row


def gains(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return trees over chains: the largest tree over the best chain, and at equal nodes.

    A chain of n nodes has n - 1 drafts; equal are those that were measured of both.
    """
    out = {}
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        for temperature in map(str, TEMPERATURES):
            mine = [row for row in rows if row["drafter"] == drafter]
            chains, trees = (
                {row["budget"]: row["tokens_per_round"][temperature] for row in mine if row["draft"] == kind}
                for kind in ("chain", "tree")
            )
            if not chains or not trees:
                continue
            best = max(chains.values())
            out[f"{drafter} at {temperature}, {max(trees)} nodes over the best chain"] = (
                trees[max(trees)] / best
            )
            for n in sorted(set(chains) & set(trees)):
                out[f"{drafter} at {temperature}, {n} nodes"] = trees[n] / chains[n]
    return {name: round(value, 3) for name, value in out.items()}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="of each category")
    parser.add_argument("--drafter", choices=("mtp", "dflash"), nargs="*", default=["mtp", "dflash"])
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 12, 16, 32, 64])
    parser.add_argument("--depth", type=int, default=LONGEST_CHAIN, help="longest path of a tree")
    parser.add_argument("--chains", type=int, nargs="*", default=[3, 7, 11, LONGEST_CHAIN], help="drafts")
    parser.add_argument("--results", type=Path, help="add what was measured to this file, as a row")
    args = parser.parse_args()

    model = models.TINY_MOE
    llm = Llama(str(model), n_ctx=512, speculation="off", verbose=False)
    prompts = models.heldout_prompts(llm, args.prompts, PROMPT)
    plain = {t: [ids for ids, _ in texts(llm, prompts, t)] for t in TEMPERATURES}
    llm.close()
    rows = []
    for drafter in args.drafter:
        path = models.DFLASH if drafter == "dflash" else None
        ways = [("chain", n + 1, {"speculation": drafter, "draft_tokens": n}) for n in args.chains]
        ways += [
            ("tree", n, {"speculation": "tree", "draft_tokens": args.depth, "tree_budget": n})
            for n in args.nodes
        ]
        for kind, budget, how in ways:
            row = {
                "drafter": drafter,
                "draft": kind,
                "budget": budget,
                **measure(model, prompts, plain, drafter=path, **how),
            }
            rows.append(row)
            print(
                f"{drafter:7} {kind:6} {budget:3} rows, {row['nodes']:5} used: "
                f"{row['tokens_per_round']} tokens a round, repeats {row['repeat_share']}",
                flush=True,
            )
    found = gains(rows)
    short = [f"{name}: {value}" for name, value in found.items() if value < GAIN]
    row = {
        "schema": SCHEMA,
        **machine(build_info()),
        "model": {"file": model.name, "bytes": probe_model(str(model)).file_bytes},
        "prompts": len(prompts),
        "prompt_tokens": PROMPT,
        "tokens": NEW,
        "rows": rows,
        "trees_over_chains": found,
        "short_of_the_goal": short,
    }
    if args.results:
        append(args.results, row)
    print(json.dumps(row))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
