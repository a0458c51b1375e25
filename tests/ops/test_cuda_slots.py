"""CUDA kernels of expert slots on a CPU (cuda_on_cpu.py): the same tests that run on a card, and more."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml
from tests.ops.expert_model import random_ids
from tests.ops.expert_slots import LEAST_STAGED_ROWS, NO, Layer
from tests.ops.layer_part import Part
from tests.ops.layer_parts import choice_by, experts
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
    return choice_by(networks, [x, norm, router, shared_router, *following])


@pytest.mark.parametrize("n_late", [0, 1, 3], ids=["all there", "down late", "all late"])
@pytest.mark.parametrize(("n", "multiprocessors"), [(1, 4), (1, 132), (3, 4)])
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"), ("F16", "F16")], ids="-".join
)
def test_products_wait_for_what_they_read(rng, backend, monkeypatch, kinds, n, multiprocessors, n_late):
    """What is on its way is read in its slot, or in host memory where it does not come.

    n_late: parts, down first, that do not come. What products must not read is poison. On few
    multiprocessors a kernel waits in front of one row's gate and up, on many their blocks wait. Counters
    begin in front of their wrap-around.
    """
    monkeypatch.setenv("CUDA_ON_CPU_MULTIPROCESSORS", str(multiprocessors))
    networks = experts(rng, n, (*kinds, *kinds), hidden=512, shared=512, n_experts=32)
    stored = [each.reshape(len(each), -1).view(np.uint8) for each, _ in networks.operands[3:6]]
    n_slots = 4 * n
    with Layer(backend, n_slots, stored) as layer, Layer(backend, 4 * n, [stored[0][:, :32].copy()]) as after:
        layer.layer.next = ctypes.addressof(after.layer)
        table = layer.table()
        table["n_given"], table["n_arrived"] = 2**26 - 1 + (n_late > 0), 2**32 - 64
        table["n_arrived"][:, : 3 - n_late] = 0 if n_late else 2**32 - 64
        layer.change(table, layer.layer.state)
        for i, part in enumerate(layer.layer.parts[:3]):
            first = layer.first_slots[part.plane] if i >= 3 - n_late else 0
            layer.change(
                np.full((n_slots, stored[i].shape[1]), 0xFF, np.uint8), part.base + first * part.stride
            )
        found, ids, indices = layer.networks(choice_of(rng, networks), networks, 3)
        slots, n_given_up = layer.table()["entries"]["slot"][ids], layer.table()["counted"][6]
    assert np.array_equal(found, networks.run(backend))
    assert (n_given_up > 0) == (n_late > 0)
    assert (ids >= n_slots).any()
    on_its_way = (ids >= n_slots) | (n_late > 0)
    for plane, first in zip(indices, layer.first_slots, strict=True):
        assert np.array_equal(plane, np.where(on_its_way, ~(first + slots), first + slots))


@pytest.mark.parametrize("queues", ["early", "late"])
@pytest.mark.parametrize(
    ("n", "n_experts", "part", "multiprocessors"),
    [
        (1, 32, 0.7, 132),
        (1, 300, 0.7, 132),
        (1, 32, 0.7, 4),  # no room beside
        (1, 32, 0.5, 132),  # few slots
        (3, 300, 0.7, 4),
        (8, 16, 0.7, 4),  # rows choose more experts than there are slots
        (3, 32, 0.5, 4),
    ],
)
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0")], ids="-".join)
def test_products_look_while_slots_are_found(
    rng, backend, monkeypatch, kinds, n, n_experts, part, multiprocessors, queues
):
    """Of several steps: experts that are there, guessed, and missing, and some that are guessed for nothing.

    part: of the experts, in slots. late: what runs beside the step runs when this waits for it. Products give
    up then, and read in host memory.
    """
    monkeypatch.setenv("CUDA_ON_CPU_MULTIPROCESSORS", str(multiprocessors))
    monkeypatch.setenv("CUDA_ON_CPU_QUEUES", queues)
    networks = experts(rng, n, (*kinds, *kinds), hidden=512, shared=512, n_experts=n_experts)
    stored = [each.reshape(len(each), -1).view(np.uint8) for each, _ in networks.operands[3:6]]
    others = [rng.integers(0, 256, (n_experts, 32), np.uint8)]
    n_slots, k = int(part * n_experts), networks.n_used
    with (
        Layer(backend, n_slots, stored) as layer,
        Layer(backend, n_slots, others) as before,
        Layer(backend, n_slots, others) as after,
    ):
        before.layer.next = ctypes.addressof(layer.layer)
        layer.layer.next = ctypes.addressof(after.layer)
        for step in range(4):
            choice, chosen = choose_anew(rng, networks, backend)
            while step == 0 and not (chosen[:, 2:] >= n_slots).any():  # first, some that are missing
                choice, chosen = choose_anew(rng, networks, backend)
            guesses = random_ids(rng, n, k, n_experts)
            guesses[:, :2] = chosen[:, :2]
            before.run(random_ids(rng, n, k, n_experts), guesses=guesses)
            found, ids, _ = layer.networks(choice, networks, 3, look=True)
            assert np.array_equal(found, networks.run(backend))
            assert np.array_equal(ids, chosen)
            table = layer.table()
            slots = table["entries"]["slot"]
            resident = np.unique(ids[slots[ids] != NO]).tolist()
            assert len(resident) == min(len(np.unique(ids)), n_slots)
            for i, (first, of_part) in enumerate(zip(firsts(layer), stored, strict=True)):
                for expert in resident:
                    assert np.array_equal(layer.expert(i, first + int(slots[expert])), of_part[expert])
            assert int(table["n_all_arrived"]) == int(table["n_all_given"]) * 64 * 3
            assert int(table["is_found"]) == (part > 0.5 and (n > 1 or multiprocessors > 4))
    assert (int(table["counted"][6]) > 0) == (queues == "late")


def choose_anew(rng: np.random.Generator, networks: Part, backend: str) -> tuple[Part, np.ndarray]:
    """Give networks other rows; return their dw_choice, and what it chooses: int32[rows, k]."""
    shape = networks.operands[0][0].shape
    networks.operands[0] = (rng.normal(0, 1, shape).astype(np.float32), "F32")
    choice, n_experts = choice_of(rng, networks), len(networks.operands[2][0])
    whole = ggml.run(choice.op(), choice.operands, choice.shape, backend=backend, dtype=np.int32)
    return choice, whole[: shape[0] * n_experts].reshape(shape[0], n_experts)[:, : networks.n_used]


def firsts(layer: Layer) -> list[int]:
    """Return where each part's slots begin."""
    return [layer.first_slots[each.plane] for each in layer.layer.parts[: len(layer.parts)]]
