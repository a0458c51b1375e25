"""The ops of src/ops/expert-slots in Python, without a thought for speed: expert-slots.h, guess.h, policy.h.

Must not know: devices, what any test expects. Shapes: ids int32[rows, k].
"""

from __future__ import annotations

import numpy as np

MAX_PARTS, MAX_EXPERTS, MAX_FILL_ROWS, MAX_PICKS, MAX_GUESSES = 3, 1024, 64, 2048, 64
NO = -1

ENTRY = np.dtype(
    [("recency", "u8"), ("heat", "u4"), ("epoch", "u4"), ("slot", "i4"), ("guessed", "u4")], align=True
)
TABLE = np.dtype(
    [
        ("counted", "u8", 7), ("step", "u4"), ("n_fills", "i4"), ("n_guesses", "i4"), ("reserved", "i4"),
        ("fills", "i4", (MAX_EXPERTS, 2)), ("guesses", "i4", (MAX_GUESSES, 2)),
        ("entries", ENTRY, MAX_EXPERTS),
        ("n_given", "u4", MAX_EXPERTS), ("n_arrived", "u4", (MAX_EXPERTS, MAX_PARTS)),
        ("n_all_given", "u4"), ("n_all_arrived", "u4"), ("is_found", "u4"),
    ],
    align=True,
)  # fmt: skip


def first_table(n_experts: int, n_slots: int) -> np.ndarray:
    """Return the table of experts 0.. in the slots, as dw::expert_slots::initial makes it."""
    table = np.zeros((), TABLE)
    table["entries"]["slot"] = NO
    for expert in range(min(n_slots, n_experts)):
        table["entries"][expert]["slot"] = expert
        table["entries"][expert]["recency"] = n_slots - expert
    return table


class Model:
    """A layer's table, changed as the ops change it."""

    def __init__(self, n_experts: int, n_slots: int, policy: str) -> None:
        self.table = first_table(n_experts, n_slots)
        self.n_experts, self.policy = n_experts, policy

    def heat(self, expert: int, epoch: int) -> int:
        """Return an expert's heat now."""
        entry = self.table["entries"][expert]
        halvings = epoch - int(entry["epoch"])
        return int(entry["heat"]) >> halvings if halvings < 32 else 0

    def _add(self, expert: int, epoch: int, heat: int) -> None:
        entry = self.table["entries"][expert]
        entry["heat"], entry["epoch"] = min(self.heat(expert, epoch) + heat, 65535), epoch

    def _key(self, expert: int, epoch: int) -> tuple[int, int, int]:
        recency = int(self.table["entries"][expert]["recency"])
        return (self.heat(expert, epoch) if self.policy == "frequency" else 0, recency, expert)

    def step(self, ids: np.ndarray) -> None:
        """Change the table as a step with these choices does."""
        entries, (rows, k) = self.table["entries"], ids.shape
        looks = rows > MAX_FILL_ROWS or rows * k > MAX_PICKS or k >= self.n_experts
        flat = [int(e) for e in ids.reshape(-1)]
        chosen = sorted(set(flat))
        hits = [e for e in chosen if entries[e]["slot"] != NO]
        missing = [e for e in chosen if entries[e]["slot"] == NO]
        self.table["n_fills"] = 0
        if not looks:
            self.table["step"] += 1
        epoch = int(self.table["step"]) // 64
        for expert in [] if looks else missing:
            free = [e for e in range(self.n_experts) if entries[e]["slot"] != NO and e not in set(chosen)]
            if not free:
                break
            out = min(free, key=lambda e: self._key(e, epoch))
            slot = int(entries[out]["slot"])
            entries[out]["slot"], entries[expert]["slot"] = NO, slot
            self.table["fills"][int(self.table["n_fills"])] = (expert, slot)
            self.table["n_fills"] += 1
        for expert in chosen if k < self.n_experts else []:
            if looks:
                self._add(expert, epoch, 4096 * flat.count(expert) // rows)
            else:
                last = len(flat) - 1 - flat[::-1].index(expert)
                self._add(expert, epoch, 256 if expert in flat[:k] else 64)
                entries[expert]["recency"] = int(self.table["step"]) * MAX_PICKS + last + 1
        n_fills = int(self.table["n_fills"])
        step = int(self.table["step"])
        right = 0 if looks else sum(int(entries[e]["guessed"]) == step for e in chosen)
        counted = [1, len(hits), n_fills, len(missing) - n_fills, 0, right, 0]
        self.table["counted"] += np.array(counted, np.uint64)

    def guess(self, hidden: np.ndarray, norm: np.ndarray, router: np.ndarray, k: int) -> None:
        """Change the table as guesses from rows hidden f32[rows, n] do."""
        logits = hidden.astype(np.float64) * norm @ router.T.astype(np.float64)
        self.fetch(np.argsort(-logits, axis=1, kind="stable")[:, :k])

    def fetch(self, guesses: np.ndarray) -> None:
        """Change the table as guesses int[rows, k] do."""
        entries, step = self.table["entries"], int(self.table["step"]) + 1
        chosen = sorted({int(e) for e in guesses.flat})
        self.table["n_guesses"] = 0
        for expert in [e for e in chosen if entries[e]["slot"] == NO][:MAX_GUESSES]:
            free = [e for e in range(self.n_experts) if entries[e]["slot"] != NO and e not in set(chosen)]
            if not free:
                break
            out = min(free, key=lambda e: self._key(e, step // 64))
            slot = int(entries[out]["slot"])
            entries[out]["slot"], entries[expert]["slot"], entries[expert]["guessed"] = NO, slot, step
            self.table["guesses"][int(self.table["n_guesses"])] = (expert, slot)
            self.table["n_guesses"] += 1
        self.table["counted"][4] += np.uint64(self.table["n_guesses"])


def random_ids(draw: np.random.Generator, rows: int, k: int, n_experts: int) -> np.ndarray:
    """Return k different experts a row, int32[rows, k], some of them popular."""
    weights = 1.0 / np.arange(1, n_experts + 1) ** 1.5
    weights /= weights.sum()
    return np.stack(
        [draw.choice(n_experts, k, replace=False, p=weights).astype(np.int32) for _ in range(rows)]
    )


def random_router(
    draw: np.random.Generator, rows: int, n_experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden f32[rows, 64], norm f32[64], router f32[n_experts, 64] of small whole numbers.

    So sums are exact in any order, and many logits are equal.
    """
    hidden, router = (draw.integers(-3, 4, (n, 64)).astype(np.float32) for n in (rows, n_experts))
    return hidden, draw.integers(1, 4, 64).astype(np.float32), router
