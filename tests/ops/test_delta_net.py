"""src/ops/delta-net.*: bit-equal to ggml's own GATED_DELTA_NET, and close to a float64 oracle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

_spec = importlib.util.spec_from_file_location("ggml_graph", Path(__file__).with_name("ggml_graph.py"))
assert _spec is not None
assert _spec.loader is not None
ggml = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ggml)


def inputs(rng, n_seqs, n_tokens, heads, key_heads, size):
    """q, k, v, g, beta, state in numpy's order (slowest first), k of length 1 as the models normalise it."""
    k = rng.standard_normal((n_seqs, n_tokens, key_heads, size))
    return [
        x.astype(np.float32)
        for x in (
            rng.standard_normal((n_seqs, n_tokens, key_heads, size)),
            k / np.linalg.norm(k, axis=-1, keepdims=True),
            rng.standard_normal((n_seqs, n_tokens, heads, size)),
            -rng.exponential(0.5, (n_seqs, n_tokens, heads, 1)),
            rng.uniform(0, 1, (n_seqs, n_tokens, heads, 1)),
            rng.standard_normal((n_seqs, heads, size, size)),
        )
    ]


def run(arrays, n_keep, *, use_ref, n_threads):
    """Return (out [seqs, tokens, heads, size], snapshots [n_keep, seqs, heads, size, size])."""
    v = arrays[2]
    n_seqs, _, heads, size = v.shape
    n_state = n_seqs * heads * size * size
    flat = ggml.run(
        lambda context, *tensors: ggml.base.ggml_gated_delta_net(context, *tensors, n_keep),
        [(x, "F32") for x in arrays],
        (v.size + n_keep * n_state,),
        use_ref=use_ref,
        n_threads=n_threads,
    )
    return flat[: v.size].reshape(v.shape), flat[v.size :].reshape(n_keep, n_seqs, heads, size, size)


def oracle(arrays):
    """The rule of delta-net.h in float64: out and the states after each token."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in arrays)
    _, n_tokens, heads, size = v.shape
    repeat = heads // q.shape[2]
    q, k = (np.tile(x, (1, 1, repeat, 1)) for x in (q, k))  # head h uses key head h % key_heads
    out, states = np.empty_like(v), []
    for t in range(n_tokens):
        state = state * np.exp(g[:, t, :, :, None])
        delta = (v[:, t] - np.einsum("shji,shi->shj", state, k[:, t])) * beta[:, t]
        state = state + delta[..., None] * k[:, t, :, None, :]
        out[:, t] = np.einsum("shji,shi->shj", state, q[:, t]) / size**0.5
        states.append(state)
    return out, np.stack(states)


@pytest.mark.parametrize("n_keep", [1, 3, 9])
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("n_seqs", "heads", "key_heads", "size"), [(1, 2, 1, 128), (2, 4, 2, 64), (1, 3, 3, 16), (1, 2, 1, 33)]
)
def test_equal_to_ggml_and_near_float64(n_seqs, heads, key_heads, size, n_tokens, n_keep):
    arrays = inputs(np.random.default_rng(), n_seqs, n_tokens, heads, key_heads, size)
    stock_out, stock_states = run(arrays, n_keep, use_ref=False, n_threads=1)
    exact_out, exact_states = oracle(arrays)
    n_written = min(n_keep, n_tokens)
    for n_threads in (1, 2, 3):
        out, states = run(arrays, n_keep, use_ref=True, n_threads=n_threads)
        assert np.array_equal(out, stock_out)
        assert np.array_equal(states[:n_written], stock_states[:n_written])
        assert np.isnan(states[n_written:]).all()  # slots of older tokens are the caller's
    np.testing.assert_allclose(out, exact_out, rtol=0, atol=2e-4)
    np.testing.assert_allclose(states[:n_written], exact_states[::-1][:n_written], rtol=0, atol=2e-4)
