"""src/ops/layer-parts on a device: tests/ops/layer_kernels.py, and what only a device shows.

`-k smallest` runs every op once: for compute-sanitizer.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

from bench import testing_api as api
from tests.gpu.recorder import OP_ERROR
from tests.model.test_fused_layers import ALWAYS, OF_TINY, TINY
from tests.ops import ggml_graph as ggml
from tests.ops import layer_parts as parts
from tests.ops.attention_kernels import *  # noqa: F403
from tests.ops.layer_kernels import *  # noqa: F403
from tests.ops.layer_kernels import MODEL, Q4, errors
from tests.ops.layer_part import BOUNDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


@pytest.fixture
def backend() -> str:
    return "CUDA"


@pytest.fixture
def rng(record_property):
    """Random numbers from a new seed, which a failure prints; the largest error goes into the row."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    errors.clear()
    yield np.random.default_rng(seed)
    if errors:
        record_property(OP_ERROR, max(errors))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_steps_are_ggmls(rng, size):
    """Near float64, and equal to the tree's walk of a chain, which is equal to ggml-cuda's own op."""
    for n in (1, 2, 9, 16):
        part = parts.delta_step(rng, n, size=size)
        found, written = part.run_and_write("CUDA")
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert parts.distance(written, part.wanted_target) < BOUNDS[True]
        q, k, v, g, beta, states, cells, _ = part.operands
        state = states[0][cells[0][0]].reshape(1, -1, size, size)
        stock = ggml.run(
            lambda context, *sources: ggml.base.ggml_gated_delta_net(context, *sources, 1),
            [*((each[None], kind) for each, kind in (q, k, v, g, beta)), (state, "F32")],
            (found.size + written.size,), backend="CUDA",
        )  # fmt: skip
        assert np.array_equal(stock, np.concatenate([found.ravel(), written]))


def test_the_same_input_gives_the_same_bits(rng):
    part = parts.experts(rng, 6, Q4, **MODEL)
    with ggml.Graph(part.op(), part.operands, backend="CUDA") as graph:
        graph.compute()
        first = graph.get(part.shape)
        for _ in range(50):
            graph.compute()
            assert np.array_equal(graph.get(part.shape), first)


def test_a_model_on_the_card_is_made_of_them():
    """The same parts as tests/model/test_fused_layers.py finds on a CPU."""
    for way, settings in {"off": {}, "mtp": {"draft_tokens": 3}, "tree": {"tree_budget": 12}}.items():
        llm = Llama(
            TINY, n_gpu_layers=-1, n_ctx=512, verbose=False, flash_attn=True, speculation=way, **settings
        )
        prompt = llm.tokenize(b"import os\nimport sys\n\n\ndef main():\n", add_bos=False)
        assert len(list(islice(llm.generate(prompt, temp=0.0), 64))) == 64
        parts_of = {name: n for name, n in api.fused(llm._engine).items() if n}
        assert parts_of == (OF_TINY if way == "off" else ALWAYS)
        llm.close()
