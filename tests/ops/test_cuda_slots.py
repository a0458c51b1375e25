"""CUDA kernels of expert slots on a CPU (cuda_on_cpu.py): the same tests that run on a card, and one more."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from tests.ops.expert_model import random_ids
from tests.ops.expert_slots import LEAST_STAGED_ROWS, NO, Layer
from tests.ops.layer_part import Part
from tests.ops.layer_parts import experts, size_of_choice
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


def choice_of(rng: np.random.Generator, networks: Part) -> Part:
    """Return the dw_choice of a dw_experts, with a next router."""
    x, norm, router, *_, shared_router = networks.operands[:7]
    following = [(rng.permutation(stored), kind) for stored, kind in (norm, router)]
    shape = (size_of_choice(len(router[0]), *x[0].shape),)
    return replace(networks, name="dw_choice", operands=[x, norm, router, shared_router, *following],
                   shape=shape, kind="I32")  # fmt: skip


@pytest.mark.parametrize("comes", [True, False], ids=["there", "too late"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("kind", "kind_of_down", "hidden"),
    [
        ("Q4_K", "Q6_K", 512),
        ("Q8_0", "Q8_0", 512),
        ("F16", "F16", 512),
        ("Q8_0", "Q8_0", 32),
        ("F16", "F16", 32),
    ],
)
def test_products_wait_for_what_they_read(rng, backend, kind, kind_of_down, hidden, n, comes):
    """What was asked for is read in its slot, or in host memory where it does not come in time.

    Where the products must not read is poison. Blocks of 32 hidden values, one row's, wait themselves.
    """
    kinds = (kind, kind_of_down, kind, kind_of_down)
    networks = experts(rng, n, kinds, hidden=hidden, shared=hidden)
    stored = [each.reshape(len(each), -1).view(np.uint8) for each, _ in networks.operands[3:6]]
    n_slots = 12
    with Layer(backend, n_slots, stored) as layer, Layer(backend, 12, [stored[0][:, :32].copy()]) as after:
        layer.layer.next = ctypes.addressof(after.layer)
        for i, part in enumerate(layer.layer.parts[: len(stored)]):
            first = 0 if comes else layer.first_slots[part.plane]
            layer.change(
                np.full((n_slots, stored[i].shape[1]), 0xFF, np.uint8), part.base + first * part.stride
            )
        table = layer.table()
        table["n_given"] += not comes
        layer.change(table, layer.layer.state)
        found, ids, indices = layer.networks(choice_of(rng, networks), networks, 3)
        slots = layer.table()["entries"]["slot"][ids]
    assert np.array_equal(found, networks.run(backend))
    asked = (ids >= n_slots) | (not comes)
    for plane, first in zip(indices, layer.first_slots, strict=True):
        if n == 1 and hidden > 32:  # a kernel waited in front of blocks that leave no room for copies
            assert np.array_equal(plane, first + slots if comes else ids)
        else:
            assert np.array_equal(plane, np.where(asked, ~(first + slots), first + slots))
