"""Operands of src/ops/layer-parts and what they give, in float64: what its tests on CPU and GPU share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.ops import ggml_graph as ggml
from tests.ops.layer_part import (
    EPSILON,
    Array,
    Part,
    as_float64,
    f32,
    normalised,
    sigmoid,
    stored_weights,
    times,
    weights,
)
from tests.ops.trees import batch, path_to


def experts(
    rng: np.random.Generator, n: int, kinds: tuple[str, str, str, str], *, width: int = 256,
    hidden: int = 256, shared: int = 256, n_experts: int = 16, n_used: int = 4, is_joint: bool = False,
    router: str = "F32", n_equals: int = 1,
) -> Part:  # fmt: skip
    """Return dw_experts; kinds: of gate and up, of down, and of the shared expert's.

    n_equals: experts with the same logits, side by side, of which the lowest is best.
    """
    x, norm = f32(rng, n, width), f32(rng, width)
    (stored, _), _ = weights(rng, (n_experts // n_equals, width), router)
    o_router = (np.repeat(stored, n_equals, axis=0), router)
    w_router = as_float64(*o_router)
    o_shared, w_shared = weights(rng, (1, width), router)
    up_kind, down_kind, s_up_kind, s_down_kind = kinds
    o_gate = stored_weights(rng, (n_experts, (2 if is_joint else 1) * hidden, width), up_kind)
    o_up = o_gate if is_joint else stored_weights(rng, (n_experts, hidden, width), up_kind)
    o_down = stored_weights(rng, (n_experts, width, hidden), down_kind)
    o_s_gate, w_s_gate = weights(rng, (shared, width), s_up_kind)
    o_s_up, w_s_up = weights(rng, (shared, width), s_up_kind)
    o_s_down, w_s_down = weights(rng, (width, shared), s_down_kind)

    def passed(h: Array, gate: Array, up: Array, down: Array, kind: str, kind_of_down: str) -> Array:
        g, u = times(gate, kind, h).astype(np.float64), times(up, kind, h)
        return times(down, kind_of_down, (g * sigmoid(g) * u).astype(np.float32)).astype(np.float64)

    h = normalised(x, norm)
    logits = times(w_router, router, h)
    wanted = x.astype(np.float64)
    for row in range(n):
        best = np.argsort(-logits[row], kind="stable")[:n_used]
        shares = np.exp((logits[row][best] - logits[row][best[0]]).astype(np.float64))
        here = h[row : row + 1]
        for expert, share in zip(best, shares / shares.sum(), strict=True):
            gate, up, down = (as_float64(stored[expert], kind) for stored, kind in (o_gate, o_up, o_down))
            passed_on = passed(here, gate[:hidden], up[-hidden:], down, up_kind, down_kind)
            wanted[row] += share * passed_on[0]
        own = sigmoid(times(w_shared, router, here))[0, 0]
        wanted[row] += own * passed(here, w_s_gate, w_s_up, w_s_down, s_up_kind, s_down_kind)[0]
    operands = [
        (x, "F32"),
        (norm, "F32"),
        o_router,
        o_gate,
        o_up,
        o_down,
        o_shared,
        o_s_gate,
        o_s_up,
        o_s_down,
    ]
    return Part("dw_experts", operands, (n, width), wanted, (0,), (width,), n_used, is_joint)


def size_of_choice(n_experts: int, n: int, width: int) -> int:
    """Return dw::layer_parts::choice::size."""
    return sum(-(-x // 32) * 32 for x in (n_experts * n, 2 * n * (n_experts + 1))) + 2 * n * width


def choice_by(part: Part, operands: list[tuple[Array, str]]) -> Part:
    """Return a dw_choice of these operands, for a dw_experts."""
    shape = (size_of_choice(len(operands[2][0]), *operands[0][0].shape),)
    return replace(part, name="dw_choice", operands=operands, shape=shape, is_joint=False, kind="I32")


def in_a_pool(rng: np.random.Generator, part: Part, backend: str) -> Array:
    """Return what dw_choice and dw_chosen_experts make of dw_experts' operands.

    Experts lie elsewhere than their numbers say, those of down elsewhere than the others. What is not an
    expert is poison. Another router, as of the next layer, must choose in the same op what it does in one of
    its own.
    """
    x, norm, router, gate, up, down, shared_router, *shared = part.operands
    n, n_experts = len(x[0]), len(router[0])
    next_norm = (rng.permutation(norm[0]), norm[1])
    next_router = (rng.permutation(router[0]), router[1])

    def chosen_by(operands: list[tuple[Array, str]]) -> Array:
        chosen = choice_by(part, operands)
        return ggml.run(chosen.op(), operands, chosen.shape, backend=backend, n_threads=2, dtype=np.int32)

    def rows_of(choice: Array) -> Array:
        return choice[: n * n_experts].reshape(n, n_experts)

    first = [x, norm, router, shared_router]
    choice = chosen_by(first)
    ids = rows_of(choice)[:, : part.n_used]
    at = 2 * part.n_used + 1
    if n_experts >= at + part.n_used:
        both = rows_of(chosen_by([*first, next_norm, next_router]))
        alone = rows_of(chosen_by([x, next_norm, next_router, shared_router]))
        assert np.array_equal(both[:, :at], rows_of(choice)[:, :at])
        assert np.array_equal(both[:, at : at + part.n_used], alone[:, : part.n_used])
    assert all(len(set(row)) == part.n_used for row in ids.tolist())
    planes, moved = [np.zeros_like(ids)], []
    for _ in range(2):
        places = rng.permutation(n_experts + 3)[:n_experts].astype(np.int32)
        planes.append(places[ids])
        moved.append(places)

    def moved_to(places: Array, stored: Array) -> Array:
        whole = np.full((n_experts + 3, *stored.shape[1:]), 0xFF, np.uint8).astype(stored.dtype)
        whole[places] = stored
        return whole

    weights = [(moved_to(moved[i], stored), kind) for i, (stored, kind) in ((0, gate), (0, up), (1, down))]
    if part.is_joint:
        weights[1] = weights[0]
    indices = (np.stack(planes), "I32")
    operands = [x, norm, (choice, "I32"), indices, *weights, *shared]
    last = replace(part, name="dw_chosen_experts", operands=operands, planes=(1, 2), size=n_experts)
    return last.run(backend)


def feed_forward(
    rng: np.random.Generator, n: int, kinds: tuple[str, str], *, width: int = 256, hidden: int = 512
) -> Part:
    """Return dw_feed_forward; kinds: of gate and up, and of down."""
    x, norm = f32(rng, n, width), f32(rng, width)
    o_gate, w_gate = weights(rng, (hidden, width), kinds[0])
    o_up, w_up = weights(rng, (hidden, width), kinds[0])
    o_down, w_down = weights(rng, (width, hidden), kinds[1])
    h = normalised(x, norm)
    g, u = times(w_gate, kinds[0], h).astype(np.float64), times(w_up, kinds[0], h)
    wanted = x + times(w_down, kinds[1], (g * sigmoid(g) * u).astype(np.float32)).astype(np.float64)
    operands = [(x, "F32"), (norm, "F32"), o_gate, o_up, o_down]
    return Part("dw_feed_forward", operands, (n, width), wanted, (0,), (width,))


def delta_inputs(
    rng: np.random.Generator, n: int, kinds: tuple[str, str, str], *, width: int = 256, n_qkv: int = 96,
    n_z: int = 70, heads: int = 6,
) -> Part:  # fmt: skip
    """Return dw_delta_inputs; kinds: of qkv, z, and both beta and alpha."""
    x, norm, dt, a = f32(rng, n, width), f32(rng, width), f32(rng, heads), f32(rng, heads)
    sizes = zip((n_qkv, n_z, heads, heads), (*kinds, kinds[-1]), strict=True)
    made = [(*weights(rng, (rows, width), kind), kind) for rows, kind in sizes]
    h = normalised(x, norm)
    qkv, z, beta, alpha = (times(w, kind, h) for _, w, kind in made)
    decay = np.log1p(np.exp((alpha + dt).astype(np.float64))) * a
    wanted = np.concatenate([part.ravel() for part in (qkv, z, sigmoid(beta), decay)])
    operands = [(x, "F32"), (norm, "F32"), *(operand for operand, _, _ in made), (dt, "F32"), (a, "F32")]
    return Part("dw_delta_inputs", operands, wanted.shape, wanted, (0,), (n_qkv, n_z, heads, heads))


def delta_heads(
    rng: np.random.Generator,
    n: int,
    *,
    rows: int = 1,
    size: int = 64,
    n_keys: int = 2,
    heads: int = 4,
    width: int = 4,
) -> Part:
    """Return dw_delta_heads for n sequences of `rows` rows."""
    channels = (2 * n_keys + heads) * size
    windows, kernel = f32(rng, n, channels, rows + width - 1), f32(rng, channels, width)
    return delta_heads_of(windows, kernel, size, n_keys)


def delta_heads_of(windows: Array, kernel: Array, size: int, n_keys: int) -> Part:
    """Return dw_delta_heads of windows [n, channels, rows + W - 1]."""
    n, channels, width = len(windows), *kernel.shape
    rows, heads = windows.shape[2] - width + 1, channels // size - 2 * n_keys
    wide = np.lib.stride_tricks.sliding_window_view(windows.astype(np.float64), width, axis=2)
    sums = (wide * kernel[:, None]).sum(-1).astype(np.float32).transpose(0, 2, 1)  # [n, rows, channels]
    y = (sums * sigmoid(sums)).reshape(n * rows, -1, size)
    scale = np.sqrt((y**2).mean(-1, keepdims=True) + EPSILON) * np.sqrt(size)
    parts = [part / part_scale for part, part_scale in zip(np.split(y, [n_keys, 2 * n_keys], axis=1), (
        *np.split(scale, [n_keys, 2 * n_keys], axis=1)[:2], np.ones(1)), strict=True)]  # fmt: skip
    wanted = np.concatenate([part.ravel() for part in parts])
    sizes = (n_keys * size, n_keys * size, heads * size)
    by_row = (0,) if rows == 1 else ()
    operands = [(windows, "F32"), (kernel, "F32")]
    return Part("dw_delta_heads", operands, wanted.shape, wanted, by_row, sizes, size=size, n_keys=n_keys)


def delta_front(rng: np.random.Generator, n: int, *, size: int = 64, n_keys: int = 2, heads: int = 4) -> Part:
    """Return dw_delta_front of n rows; the target is another cell's state."""
    like = delta_heads(rng, 1, rows=n, size=size, n_keys=n_keys, heads=heads)
    (windows, _), kernel = like.operands
    states, cells = f32(rng, 3, windows.shape[1] * 3), rng.integers(0, 3, 2, dtype=np.int32)
    states[cells[0]] = windows[0, :, :3].ravel()
    target = np.full(windows.shape[1] * 3, np.nan, np.float32)
    operands = [(windows[0, :, 3:].T.copy(), "F32"), (states, "F32"), (cells, "I32"), (target, "F32"), kernel]
    return replace(
        like, name="dw_delta_front", operands=operands, by_row=(), target=(3, 1),
        wanted_target=windows[0, :, n:].ravel(),
    )  # fmt: skip


def delta_tree(
    rng: np.random.Generator,
    trees: list[list[int]],
    *,
    room: int = 40,
    size: int = 64,
    n_keys: int = 2,
    heads: int = 4,
) -> Part:
    """Return dw_delta_tree for trees of equal numbers of nodes, given by their parents."""
    n_nodes = len(trees[0])
    n = len(trees) * n_nodes
    channels = (2 * n_keys + heads) * size
    x, kernel = f32(rng, n, channels), f32(rng, channels, 4)
    cells = rng.permutation(len(trees) + 2)[: len(trees)].astype(np.int32)
    states = f32(rng, len(trees) + 2, channels * 3)
    windows = []
    for s, parents in enumerate(trees):
        old = states[cells[s]].reshape(channels, 3)
        for node in range(n_nodes):
            path = [s * n_nodes + i for i in path_to(parents, node)]
            windows.append(np.concatenate([old, x[path].T], axis=1)[:, -4:])
    like = delta_heads_of(np.stack(windows), kernel, size, n_keys)
    kept = np.full((n, channels), np.nan, np.float32)
    operands = [
        *((x, "F32"), (states, "F32"), (cells, "I32")),
        *((batch(trees, room), "I32"), (kept, "F32"), (kernel, "F32")),
    ]
    return replace(
        like, name="dw_delta_tree", operands=operands, by_row=(), target=(4, 4), wanted_target=x.ravel()
    )


def delta_step(rng: np.random.Generator, n: int, *, size: int = 64, n_keys: int = 2, heads: int = 4) -> Part:
    """Return dw_delta_step; the target is another cell's state."""
    q, k = (f32(rng, n, n_keys, size) / np.float32(np.sqrt(size)) for _ in range(2))
    v, g, beta = f32(rng, n, heads, size), -np.abs(f32(rng, n, heads, 1)), np.abs(f32(rng, n, heads, 1)) / 4
    states, cells = f32(rng, 3, heads * size * size), rng.integers(0, 3, 2, dtype=np.int32)
    state = states[cells[0]].reshape(heads, size, size).astype(np.float64)  # row j: of value j over the keys
    wanted = np.empty((n, heads, size))
    for r in range(n):
        for h in range(heads):
            key, query = k[r, h % n_keys].astype(np.float64), q[r, h % n_keys].astype(np.float64)
            state[h] *= np.exp(float(g[r, h, 0]))
            state[h] += np.outer((v[r, h] - state[h] @ key) * float(beta[r, h, 0]), key)
            wanted[r, h] = state[h] @ query / np.sqrt(size)
    target = np.full(heads * size * size, np.nan, np.float32)
    operands = [(each, "F32") for each in (q, k, v, g, beta, states)] + [(cells, "I32"), (target, "F32")]
    return Part(
        "dw_delta_step", operands, wanted.shape, wanted, (), (), target=(7, 5), wanted_target=state.ravel()
    )


def attention_inputs(
    rng: np.random.Generator, n: int, kinds: tuple[str, ...], *, width: int = 256,
    rows: tuple[int, ...] = (128, 32, 33), scale: float = 1.0,
) -> Part:  # fmt: skip
    """Return dw_attention_inputs; kinds: of q, k and v, or of several layers' k and v; scale: of x."""
    x, norm = f32(rng, n, width) * np.float32(scale), f32(rng, width)
    made = [(*weights(rng, (size, width), kind), kind) for size, kind in zip(rows, kinds, strict=True)]
    h = normalised(x, norm)
    wanted = np.concatenate([times(w, kind, h).ravel() for _, w, kind in made])
    operands = [(x, "F32"), (norm, "F32"), *(operand for operand, _, _ in made)]
    return Part("dw_attention_inputs", operands, wanted.shape, wanted, (0,), rows)


def draft_input(rng: np.random.Generator, n: int, kind: str, *, width: int = 256, rows: int = 301) -> Part:
    """Return dw_draft_input."""
    e, h = f32(rng, n, width), f32(rng, n, width) * np.float32(30)
    norms = f32(rng, 2, width)
    operand, w = weights(rng, (rows, 2 * width), kind)
    x = np.concatenate([normalised(part, norm) for part, norm in zip((e, h), norms, strict=True)], axis=1)
    operands = [(e, "F32"), (norms[0], "F32"), (h, "F32"), (norms[1], "F32"), operand]
    return Part("dw_draft_input", operands, (n, rows), times(w, kind, x), (0, 2), (rows,))


def product(
    rng: np.random.Generator, n: int, kind: str, *, width: int = 256, rows: int = 301, of: int = 0
) -> Part:
    """Return dw_product; of: how many rows its own are picked from, 0 for none."""
    x = f32(rng, of or n, width)
    operand, w = weights(rng, (rows, width), kind)
    if not of:
        return Part("dw_product", [(x, "F32"), operand], (n, rows), times(w, kind, x), (0,), (rows,))
    picked = rng.integers(0, of, n, dtype=np.int32)
    operands = [(x, "F32"), operand, (picked, "I32")]
    return Part("dw_product", operands, (n, rows), times(w, kind, x[picked]), (2,), (rows,))


def norm(rng: np.random.Generator, n: int, kind: str, *, width: int = 256) -> Part:
    """Return dw_norm, which has no weights of a type."""
    x, factors = f32(rng, n, width) * np.float32(30), f32(rng, width)
    wanted = normalised(x, factors).astype(np.float64)
    return Part("dw_norm", [(x, "F32"), (factors, "F32")], (n, width), wanted, (0,), (width,))


def delta_output(
    rng: np.random.Generator, n: int, kind: str, *, width: int = 256, heads: int = 4, size: int = 128
) -> Part:
    """Return dw_delta_output."""
    y, z, norm = f32(rng, n, heads, size), f32(rng, n, heads, size), f32(rng, size)
    residual = f32(rng, n, width)
    operand, w = weights(rng, (width, heads * size), kind)
    gated = (normalised(y, norm) * (z * sigmoid(z)).astype(np.float32)).reshape(n, -1)
    wanted = residual + times(w, kind, gated).astype(np.float64)
    operands = [(y, "F32"), (z, "F32"), (norm, "F32"), operand, (residual, "F32")]
    return Part("dw_delta_output", operands, (n, width), wanted, (0, 1, 4), (width,))


def attention_output(
    rng: np.random.Generator,
    n: int,
    kind: str,
    *,
    width: int = 256,
    heads: int = 4,
    size: int = 64,
    has_gate: bool = True,
) -> Part:
    """Return dw_attention_output."""
    y, gate, residual = f32(rng, n, heads * size), f32(rng, n, heads, size), f32(rng, n, width)
    operand, w = weights(rng, (width, heads * size), kind)
    x = y * sigmoid(gate).astype(np.float32).reshape(n, -1) if has_gate else y
    wanted = residual + times(w, kind, x).astype(np.float64)
    operands = [(y, "F32"), operand, (residual, "F32"), *([(gate, "F32")] if has_gate else [])]
    return Part("dw_attention_output", operands, (n, width), wanted, (0, 2, 3)[: len(operands) - 1], (width,))


EVERY_PART: list[Callable[[np.random.Generator, int, str], Part]] = [
    lambda rng, n, kind: experts(rng, n, (kind, kind, kind, kind)),
    lambda rng, n, kind: feed_forward(rng, n, (kind, kind)),
    lambda rng, n, kind: delta_inputs(rng, n, (kind, kind, kind)),
    lambda rng, n, kind: attention_inputs(rng, n, (kind, kind, kind)),
    draft_input,
    norm,
    product,
    lambda rng, n, kind: product(rng, n, kind, of=40),
    delta_output,
    attention_output,
    lambda rng, n, kind: attention_output(rng, n, kind, has_gate=False),
]


def every_part(rng: np.random.Generator, n: int, kind: str) -> list[Part]:
    """Return each op with weights of one type."""
    return [make(rng, n, kind) for make in EVERY_PART]


def distance(found: Array, wanted: Array) -> float:
    """Return the relative error in norm."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
