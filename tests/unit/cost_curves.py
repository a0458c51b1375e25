"""Cost curves for tests: made ones, and those of bench/LOG.md and bench/results/gpu-h200.json.

Must not know: what any test expects.
"""

from __future__ import annotations

from draftwood.engine import _capi
from draftwood.engine.engine import Curve

from bench.testing_api import SOURCE_DRAFTER, CostModel

SIZES = range(_capi.CURVE_SIZE)
PLAIN = (SOURCE_DRAFTER, 0)
"""The choice of a plain step."""
NEVER, ALWAYS = 0.0, 1.0


def curve(draft: dict[int, float], verify: dict[int, float]) -> Curve:
    """Return a curve of known sizes, microseconds."""
    return Curve(*(tuple(float(times.get(n, 0.0)) for n in SIZES) for times in (draft, verify)))


def linear(row: float, draft: float = 10.0) -> Curve:
    """Return a plain step of 1,000, `row` for each further row, `draft` for each drafted token."""
    return curve({1: draft, 63: 63 * draft}, {1: 1000, 64: 1000 + 63 * row})


STEPS = curve({1: 10, 63: 630}, {1: 1000, 4: 1000, 5: 1500, 8: 1500, 9: 5000, 64: 5000})
H200 = curve({2: 967, 5: 2506}, {1: 4036, 3: 5059, 6: 7139, 16: 14795})  # 35B-A3B shapes, MTP
H200_DFLASH = curve({15: 2118}, {1: 4055, 3: 5059, 6: 7139, 16: 14795})
H100 = curve({1: 1000, 3: 3200, 5: 5000, 15: 14000}, {1: 5300, 2: 6100, 4: 7800, 6: 8800, 16: 20500})
TWO_CORES = curve({1: 113, 8: 941}, {1: 650, 2: 1030, 3: 1270, 4: 1610, 6: 2510})  # tiny-moe F16
TWO_CORES_Q8 = curve({1: 113, 8: 941}, {1: 1000, 4: 2950})  # "4 rows cost 2.9 to 3 plain steps"
TWO_CORES_BUSY = curve({1: 113, 8: 941}, {1: 871, 2: 871, 9: 26927})  # with a load of 11


def accept(model: CostModel, rates: list[float], rounds: int = 200, source: int = SOURCE_DRAFTER) -> None:
    """Add rounds whose drafts are accepted at these rates by depth, at even intervals."""
    debt = [0.0] * len(rates)
    for _ in range(rounds):
        accepted = 0
        for depth, rate in enumerate(rates):
            debt[depth] += rate
            if debt[depth] < 1.0 - 1e-9:
                break
            debt[depth] -= 1.0
            accepted += 1
        model.add_acceptance(len(rates), accepted, source)
