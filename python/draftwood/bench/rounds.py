"""Mean tokens per round, as design section 10 defines it: for bench, the demo and the model card's tools.

Emitted tokens / verify rounds, bonus token included. Rounds whose newest 16 tokens already occurred in the
text are left out, since small greedy models loop and loops accept everything; their share is told.
Must not know: the package around it (bench/rounds.py says why), torch,
tokenizers. Test: tests/unit/test_rounds.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # training machines load this file alone
    from draftwood.llama import Llama

REPEAT = 16  # tokens

Rounds = list[tuple[int, int]]  # (index of the newest token when the round starts, tokens it emitted)


def repeats(ids: Sequence[int], t: int) -> bool:
    """Tell whether the REPEAT tokens that end with ids[t] already occurred earlier in ids."""
    tail = ids[t + 1 - REPEAT : t + 1]
    return any(ids[i : i + REPEAT] == tail for i in range(t + 1 - REPEAT))


def mean_tokens(texts: Iterable[tuple[list[int], Rounds]]) -> tuple[float, float]:
    """Return mean tokens per round over the texts and the share of rounds left out as repeats."""
    counted = [(emitted, repeats(ids, t)) for ids, rounds in texts for t, emitted in rounds]
    kept = [emitted for emitted, repeated in counted if not repeated]
    if not kept:
        return 0.0, 1.0
    return round(sum(kept) / len(kept), 3), round(1 - len(kept) / len(counted), 3)


def generate_rounds(llm: Llama, prompt: list[int], n_new: int, **sampling: Any) -> tuple[list[int], Rounds]:
    """Generate n_new tokens; return all ids and the whole rounds, read off the engine's round counter.

    Without an engine there are no rounds.
    """
    llm.reset()
    llm.reset_speculation_stats()
    ids, seen = list(prompt), []
    for token in islice(llm.generate(prompt, **sampling), n_new):
        ids.append(token)
        stats = llm.speculation_stats
        seen.append(stats.rounds if stats else 0)
    rounds = [(len(prompt) + seen.index(n) - 1, seen.count(n)) for n in sorted(set(seen))]
    return ids, rounds[1:-1]  # the first token belongs to no round, and the last round may be cut short
