"""CUDA kernels of expert slots on a CPU (cuda_on_cpu.py): the same tests that run on a card, and one more."""

from __future__ import annotations

import ctypes

import numpy as np

from tests.ops.expert_model import random_ids
from tests.ops.expert_slots import LEAST_STAGED_ROWS, NO, Layer
from tests.ops.slot_kernels import *  # noqa: F403


def test_the_next_layer_is_copied_ahead(rng, backend):
    """What is not in slots lies in the stage before the layer is run. A card copies it meanwhile."""
    now, then = (rng.integers(0, 256, (32, 96), np.uint8) for _ in range(2))
    ids = random_ids(rng, LEAST_STAGED_ROWS, 4, 32)
    with Layer(backend, 20, [now], staged=True) as layer, Layer(backend, 20, [then], staged=True) as coming:
        coming.layer.staged = layer.layer.staged
        layer.layer.next, coming.layer.place = ctypes.addressof(coming.layer), 1
        slots, first = coming.table()["entries"]["slot"][:32], coming.layer.first_staged[0]
        layer.run(ids, has_next=True)
        for expert in np.flatnonzero(slots == NO).tolist():
            assert np.array_equal(coming.expert(0, first + expert), then[expert])
        found = coming.run(ids)[0]
        assert np.array_equal(
            found, np.where(slots[ids] == NO, first + ids, coming.first_slots[0] + slots[ids])
        )
