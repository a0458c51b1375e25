"""Tests of attention's CUDA kernels in src/ops/layer-parts, as layer_kernels.py has those of the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.ops import attention_heads, flash_attention
from tests.ops import layer_parts as parts
from tests.ops.layer_kernels import ROWS, relative
from tests.ops.trees import padded, random_tree


@pytest.mark.parametrize("shape", attention_heads.SHAPES)
@pytest.mark.parametrize("n", [1, 6, 16])
def test_heads_of_attention(rng, backend, n, shape):
    node = attention_heads.heads(rng, n, **shape)
    attention_heads.check(node, backend)
    if n == ROWS:
        attention_heads.check_rows(rng, node, backend)


ATTENTION = [
    {},
    {"size": 256, "n_heads": 16, "n_keys": 2},
    {"size": 128, "n_heads": 5, "n_keys": 5},
    {"size": 256, "n_heads": 6, "n_keys": 2},
    {"kind": "Q8_0", "hadamard": 64},
    {"kind": "Q8_0", "hadamard": 64, "size": 128, "n_heads": 3, "n_keys": 1},
    {"kind": "Q8_0", "hadamard": 64, "size": 256, "n_heads": 16, "n_keys": 2},
    {"kind": "Q8_0", "size": 256, "n_heads": 2, "n_keys": 2},
]
Q8 = {"kind": "Q8_0", "hadamard": 64}


def check_attention_of_rows(rng, backend, n, n_cells, **shape):
    case = flash_attention.chain(rng, n, n_cells, **shape)
    found = case.run(backend)
    assert relative(found, case.wanted()) < 1e-3  # queries and weights have 11 bits
    for count in (1, 3):
        rows = sorted(int(row) for row in rng.permutation(n)[:count])
        assert np.array_equal(case.of_rows(rows).in_another_cache(rng).run(backend), found[:, rows])


@pytest.mark.parametrize("shape", ATTENTION)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_attention_of_rows(rng, backend, n, shape):
    """Of caches of one chunk, of some that no chunk ends, and of parts of several chunks."""
    for n_cells in (n, 64, 150):
        check_attention_of_rows(rng, backend, n, n_cells, **shape)
    if shape == ATTENTION[0]:
        check_attention_of_rows(rng, backend, n, 1200)
    if n <= 8:
        check_attention_of_rows(rng, backend, n, 80, n_streams=2, **shape)


@pytest.mark.slow
def test_attention_over_parts_of_all_sizes(rng, backend):
    check_attention_of_rows(rng, backend, 2, 68000, n_heads=2, n_keys=1)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("size", [64, 256])
def test_attention_of_more_pairs_than_products_have_rows(rng, backend, size, kind):
    """Then blocks of long caches take twice as many, and the bits of a row are those of a small block."""
    shape = {"size": size, "n_heads": 2, "n_keys": 1, "kind": kind}
    check_attention_of_rows(rng, backend, 16, 4096 + 150, **shape)
    parents = random_tree(rng, 16)
    case = flash_attention.tree(rng, [parents], 4096 + 64 + int(rng.integers(1, 16)), **shape)
    found = case.run(backend)
    assert relative(found, case.wanted()) < 1e-3
    for node in (0, 7, 15):
        alone = flash_attention.as_decoded(case, [parents], 0, node).in_another_cache(rng)
        assert np.array_equal(alone.run(backend)[0, 0], found[0, node])


@pytest.mark.parametrize("one_stream", [True, False])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_attention_of_a_node_is_plain_decodes(rng, backend, n, one_stream):
    """In bits, wherever a chunk ends between the nodes, and whatever rows share a tile."""
    places = [*rng.integers(64, 64 + n + 3, 3).tolist()]
    if n == 5:  # parts of several chunks
        places += [1024 + 64 + int(rng.integers(n + 3)), 1024 + 256 + int(rng.integers(n + 3))]
    for n_cells in (n, *places):
        for shape in ({}, {"size": 128, "n_heads": 3, "n_keys": 1}, {"n_heads": 2, **Q8}):
            n_trees = 1 if n > 5 or n_cells < 2 * n else 2
            trees = [padded(random_tree(rng, int(rng.integers(1, n + 1))), n) for _ in range(n_trees)]
            case = flash_attention.tree(rng, trees, n_cells, one_stream=one_stream, **shape)
            found = case.run(backend)
            assert relative(found, case.wanted()) < 1e-3
            for i, parents in enumerate(trees):
                stream, first = (0, i * n) if one_stream else (i, 0)
                for node in range(len(parents)):
                    alone = flash_attention.as_decoded(case, trees, i, node, one_stream=one_stream)
                    alone = alone.in_another_cache(rng)
                    assert np.array_equal(alone.run(backend)[0, 0], found[stream, first + node])


def check_ahead(rng, backend, case, kind, width=256, *, has_gate=True):
    """Outputs have the bits of heads that their own kernels gate or take, and sums those without gates."""
    n_streams, n, heads, size = case.q.shape
    rows, n_values = n_streams * n, case.q.size
    output = parts.attention_output(rng, rows, kind, heads=heads, size=size, width=width, has_gate=has_gate)
    gate = rng.standard_normal((rows, heads, 2 * size)).astype(np.float32) if has_gate else None
    found = case.run_ahead(gate, backend)
    assert np.array_equal(found[:n_values].reshape(case.q.shape), case.run(backend))
    operands = [(found[:n_values].reshape(rows, -1), "F32"), *output.operands[1:3]]
    operands += [(gate[..., :size].copy(), "F32")] if has_gate else []
    alone = replace(output, operands=operands)
    behind = replace(alone, operands=[*operands, (found, "F32")], lacks=() if has_gate else (3,))
    assert np.array_equal(behind.run(backend), alone.run(backend))


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_heads_that_attention_makes_an_input_of(rng, backend, n):
    for kind, size, n_heads in (("Q4_K", 256, 16), ("Q8_0", 64, 5), ("F16", 64, 4), ("Q6_K", 128, 4)):
        case = flash_attention.chain(rng, n, n + 70, size=size, n_heads=n_heads, n_keys=1)
        for has_gate in (True, False):
            check_ahead(rng, backend, case, kind, has_gate=has_gate)


def test_such_heads_of_trees_streams_and_many_parts(rng, backend):
    shape = {"size": 128, "n_heads": 4, "n_keys": 1}
    check_ahead(rng, backend, flash_attention.tree(rng, [random_tree(rng, 5)] * 2, 80, **shape), "Q4_K")
    check_ahead(rng, backend, flash_attention.chain(rng, 3, 90, n_streams=2, **shape, **Q8), "Q4_K")
    for n_cells in (64, 16 * 64, 17 * 64, 40 * 64):  # about as many parts as are added up side by side
        check_ahead(rng, backend, flash_attention.chain(rng, 1, n_cells, **shape), "Q4_K")


@pytest.mark.parametrize(("which", "odd"), [("k", np.nan), ("v", np.nan), ("v", np.inf)])
@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize("beyond", [0, 6])
def test_attention_shows_what_is_no_number_where_it_is_seen(rng, backend, n, which, odd, beyond):
    """And nowhere else. The last row's own cell has it, alone in a part or beside others."""
    case = flash_attention.chain(rng, n, 65 + beyond)
    case.mask[:] = -np.inf
    for r in range(n):
        case.mask[0, r, : 65 + beyond - n + r + 1] = 0
    last = np.flatnonzero(case.mask[0, -1] == 0).max()
    getattr(case, which)[0, last] = odd
    found = case.run(backend)
    assert np.isfinite(found[0, :-1]).all()
    assert not np.isfinite(found[0, -1]).any()


@pytest.mark.parametrize("kind", [{}, Q8], ids=["F16", "Q8_0"])
def test_attention_of_a_row_that_sees_nothing_is_zero(rng, backend, kind):
    case = flash_attention.chain(rng, 2, 70, **kind)
    case.mask[0, 1] = -np.inf
    found = case.run(backend)
    assert np.isfinite(found).all()
    assert not found[0, 1].any()
    assert found[0, 0].all()
