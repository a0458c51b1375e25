"""Random inputs of GATED_DELTA_NET, a caller of ggml's op and a float64 oracle.

Must not know: what a test expects.
"""

from __future__ import annotations

import numpy as np

from tests.ops import ggml_graph as ggml


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


def run(arrays, n_keep, *, use_ref=False, n_threads=1, backend="CPU"):
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
        backend=backend,
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
