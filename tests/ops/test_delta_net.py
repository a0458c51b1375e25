"""src/ops/delta-net/delta-net.*: bit-equal to ggml's own GATED_DELTA_NET, and close to a float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.delta_net import inputs, oracle, run


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
