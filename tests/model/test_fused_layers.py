"""src/decode: which parts of a graph become one op each, and that text stays what it was.

On a CPU the ops are references; engines run them there because a test says so.
"""

from __future__ import annotations

import ctypes
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.cli import fused
from draftwood.engine import _capi
from draftwood.engine.engine import probe_model
from draftwood.engine.experts import ExpertPool
from draftwood.load import header

from bench import testing_api as api
from tests.model.rig import PROMPT, Rig, write_llama
from tests.model.test_dflash import with_windows
from tests.model.test_expert_pool import LAYERS, rows_of
from tests.model.test_expert_pool_models import write_lora
from tests.ops import ggml_graph as ggml

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
TINY = str(MODELS / "tiny-moe-f16.gguf")
ALWAYS = {
    "experts": 12,
    "delta inputs": 9,
    "delta tree": 9,
    "delta output": 9,
    "attention inputs": 3,
    "attention heads": 3,
    "flash attention": 3,
}
ALWAYS |= {"attention output": 3, "norm": 1, "product": 1}
OF_TINY = {**ALWAYS, "delta front": 9, "delta step": 9}
OF_TINY.pop("delta tree")
DELTA_NET = {"delta inputs", "delta front", "delta step", "delta output"}
HEAD = {"norm", "product"}
ATTENTION = {"attention inputs", "attention heads", "flash attention", "attention output"}
WAYS = {
    "mtp": {"speculation": "mtp"},
    "tree": {"speculation": "tree", "tree_budget": 16},
    "ngram": {"speculation": "ngram"},
    "dflash": {"speculation": "dflash", "drafter": str(MODELS / "dflash-f16.gguf")},
}
POOLED = {
    "f16": {},
    "q4_k and q6_k": {"types": "*down_exps*=Q6_K,Q4_K", "width": 256, "expert_ff": 256, "shared_ff": 256},
    "3 bits": {"types": "*down_exps*=Q3_K,IQ3_XXS", "width": 256, "expert_ff": 256, "shared_ff": 256},
    "merged": {"merged_experts": True, "types": "Q8_0"},
}
TOKENS = [(7 * i * i + 3 * i) % 380 + 1 for i in range(25)]
TEXT = b"import os\nimport sys\n\n\ndef main():\n    for name in "


def counts(engine) -> dict[str, int]:
    return {part: n for part, n in api.fused(engine).items() if n}


def load(where: int = api.FUSE_EVERYWHERE, **settings) -> Llama:
    llm = Llama(TINY, n_ctx=512, verbose=False, n_threads=1, **{"flash_attn": True, **settings})
    api.fuse(llm._engine, where)
    return llm


def text(llm: Llama, n: int, **sampling) -> list[int]:
    llm.set_seed(5)
    return list(islice(llm.generate(llm.tokenize(TEXT, add_bos=False), **sampling), n))


@pytest.fixture(scope="module")
def plain():
    llm = load(speculation="off")
    yield {temp: text(llm, 24, temp=temp) for temp in (0.0, 0.8)}
    llm.close()


def test_every_layer_of_a_plain_step_is_fused():
    llm = load(speculation="off")
    text(llm, 2, temp=0.0)
    assert counts(llm._engine) == OF_TINY
    assert llm.speculation_stats.fused_parts == sum(OF_TINY.values())
    llm.close()


@pytest.mark.parametrize(("type_kv", "n"), [("Q8_0", 3), ("F32", 3), ("Q4_0", 0)])
def test_heads_go_into_caches_of_other_types(rig, type_kv, n):
    """What follows is near llama.cpp's, which transforms heads for a quantised cache as well."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, flash=True, type_kv=ggml.TYPES[type_kv])
        api.fuse(r.engine, where)
        for i, token in enumerate(PROMPT[:9]):
            r.engine.eval([token], i)
        rows.append(r.logits())
        found = [counts(r.engine).get(part, 0) for part in ("attention heads", "flash attention")]
        n_attended = 0 if type_kv == "F32" else n  # llama.cpp makes them F16 first
        assert found == ([n, n_attended] if where == api.FUSE_EVERYWHERE else [0, 0])
        r.close()
    assert 0 < np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


@pytest.mark.parametrize(
    ("type_k", "type_v", "rotates", "parts"),
    [("Q8_0", "F16", True, (3, 0)), ("F16", "Q8_0", True, (3, 0)), ("Q8_0", "Q8_0", False, (3, 3))],
)
def test_caches_of_two_types_and_without_transforms(rig, monkeypatch, type_k, type_v, rotates, parts):
    """Attention over two types is llama.cpp's; the heads are transformed where llama.cpp would."""
    if not rotates:
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    types = {"type_k": ggml.TYPES[type_k], "type_v": ggml.TYPES[type_v]}
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, flash=True, context=types)
        api.fuse(r.engine, where)
        for i, token in enumerate(PROMPT[:9]):
            r.engine.eval([token], i)
        rows.append(r.logits())
        found = tuple(counts(r.engine).get(part, 0) for part in ("attention heads", "flash attention"))
        assert found == (parts if where == api.FUSE_EVERYWHERE else (0, 0))
        r.close()
    assert 0 < np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


def test_rows_far_behind_a_prompt_are_near_llama_cpps(rig):
    """A prompt's keys are turned by llama.cpp, a decode's queries are not: frequencies must be the same."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, flash=True, n_ctx=512)
        api.fuse(r.engine, where)
        first = 200_000
        decode(r, [(token, first + i, 0) for i, token in enumerate(PROMPT * 2)])
        decode(r, [(7, first + 2 * len(PROMPT), 0)])
        rows.append(r.logits())
        r.close()
    assert 0 < np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


@pytest.mark.parametrize("way", ["mtp", "tree", "dflash"])
def test_without_flash_attention_values_lie_in_columns(way):
    """Heads stay llama.cpp's; the text is the same with drafts."""
    texts = []
    for settings in ({"speculation": "off"}, WAYS[way]):
        llm = load(**settings, flash_attn=False)
        texts.append([text(llm, 24, temp=temp) for temp in (0.0, 0.8)])
        assert counts(llm._engine).items() <= {**OF_TINY, **ALWAYS}.items()
        assert "attention heads" not in counts(llm._engine)
        llm.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
def test_logits_are_near_llama_cpps(rig, flash):
    """Of a chain of rows, random weights: the two round activations otherwise."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, flash=flash)
        api.fuse(r.engine, where)
        r.engine.eval(PROMPT[:-1], 0)
        r.engine.propose_given(PROMPT[-1], [5, 7, 9])
        r.engine.verify()
        assert bool(counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        rows.append(np.array([r.logits(i) for i in range(4)]))
        r.close()
    distance = np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0])
    assert 0 < distance < 5e-3


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("way", WAYS)
def test_text_is_the_same_with_drafts(plain, way, temp):
    llm = load(**WAYS[way])
    assert text(llm, 24, temp=temp) == plain[temp]
    assert counts(llm._engine) == ALWAYS  # a verify leaves the recurrent state alone
    assert llm._engine.stats().drafted > 0
    llm.close()


Q8 = {"type_k": native.GGML_TYPE_Q8_0, "type_v": native.GGML_TYPE_Q8_0}


@pytest.fixture(scope="module")
def plain_of_q8():
    llm = load(speculation="off", **Q8)
    yield {temp: text(llm, 24, temp=temp) for temp in (0.0, 0.8)}
    assert counts(llm._engine) == OF_TINY
    llm.close()


@pytest.mark.parametrize("way", WAYS)
def test_text_over_a_quantised_cache_is_the_same_with_drafts(plain_of_q8, way):
    """Keys, queries and values are transformed by the ops, and what attention gives is transformed back."""
    llm = load(**WAYS[way], **Q8)
    if way in ("mtp", "dflash"):
        llm._engine.eval(TOKENS, 0)
        assert llm._engine.propose(5, 2) == 2
        found = api.fused(llm._engine, of_drafter=True)
        assert [found[part] for part in ATTENTION] == [1 if way == "mtp" else 3] * len(ATTENTION)
    assert {temp: text(llm, 24, temp=temp) for temp in (0.0, 0.8)} == plain_of_q8
    assert counts(llm._engine) == ALWAYS
    assert llm._engine.stats().drafted > 0
    llm.close()


@pytest.mark.parametrize("draft_vocab", [None, 64, 4096], ids=["default", "few", "all"])
@pytest.mark.parametrize("way", ["mtp", "dflash", "dflash with windows"])
def test_all_of_a_draft_is_fused(plain, tmp_path, way, draft_vocab):
    """Also one with the rows of few tokens, which llama.cpp knows nothing of."""
    settings = WAYS.get(way) or {"speculation": "dflash", "drafter": with_windows(tmp_path)}
    llm = load(**settings, draft_vocab=draft_vocab)
    llm._engine.eval(TOKENS, 0)
    assert llm._engine.propose(5, 2) == 2
    found = api.fused(llm._engine, of_drafter=True)
    assert (found["draft input"], found["norm"], found["product"]) == (way == "mtp", 1, 1)
    own, n = ("experts", 1) if way == "mtp" else ("feed forward", 3)  # layers of the drafter
    assert [found[part] for part in (own, *sorted(ATTENTION))] == [n] * (1 + len(ATTENTION))
    assert text(llm, 24, temp=0.0) == plain[0.0]
    assert llm.speculation_stats.draft_vocab == {None: 512, 64: 64, 4096: 0}[draft_vocab]
    llm.close()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_bias_is_no_residual(rig, tmp_path, has_bias):
    """It has one row; an attention layer without gates adds as many as its input has."""
    path, rows = tmp_path / "llama.gguf", []
    write_llama(path, TINY, has_bias=has_bias)
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(str(path), flash=True)
        api.fuse(r.engine, where)
        r.engine.eval(PROMPT[:-1], 0)
        r.engine.propose_given(PROMPT[-1], [5, 7])
        r.engine.verify()
        n_fused = 2 if where == api.FUSE_EVERYWHERE and not has_bias else 0  # the last layer picks rows
        assert counts(r.engine).get("attention output", 0) == n_fused
        rows.append(np.array([r.logits(i) for i in range(3)]))
        r.close()
    assert np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


@pytest.mark.parametrize(("preset", "own"), [("moe-mtp", "experts"), ("dense-mtp", "feed forward")])
@pytest.mark.parametrize("types", ["F16", "Q8_0"])
def test_both_architectures_and_types(gguf, rig, preset, own, types):
    r = rig(gguf(preset, types=types), flash=True)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT, 0)
    gates = {"attention gates"} if types == "Q8_0" else set()
    assert set(counts(r.engine)) == {own, *DELTA_NET, *ATTENTION, *HEAD, *gates}


def test_a_rows_heads_are_gated_by_the_delta_rule(gguf, rig):
    """For weights that are quantised; a batch has a kernel for it."""
    gates = {}
    for types in ("F16", "Q8_0", "*ssm_out*=F16,Q8_0"):
        r = rig(gguf("moe-mtp", types=types), flash=True)
        api.fuse(r.engine, api.FUSE_EVERYWHERE)
        r.engine.eval(PROMPT[:4], 0)
        assert "gates" not in counts(r.engine)
        r.engine.eval(PROMPT[4:5], 4)
        assert counts(r.engine)["delta step"] == 3
        gates[types] = counts(r.engine).get("gates", 0)
        r.close()
    assert list(gates.values()) == [0, 3, 0]


@pytest.mark.parametrize(("types", "n"), [("F16", 0), ("Q8_0", 1), ("*attn_output*=F16,Q8_0", 0)])
def test_attention_gates_heads_for_weights_that_are_quantised(gguf, rig, types, n):
    r = rig(gguf("moe-mtp", types=types), flash=True)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    for first, end in ((0, 4), (4, 5)):
        r.engine.eval(PROMPT[first:end], first)
        found = counts(r.engine)
        assert (found["flash attention"], found["attention output"]) == (1, 1)
        assert found.get("attention gates", 0) == n
    r.close()


def test_embeddings_that_are_asked_for_stay_and_the_head_is_fused(rig):
    found = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, flash=True)
        api.fuse(r.engine, where)
        native.llama_set_embeddings(r.ctx, True)
        r.engine.eval(PROMPT[:5], 0)
        values = native.llama_get_embeddings_ith(r.ctx, -1)
        found.append(np.ctypeslib.as_array(values, shape=(native.llama_model_n_embd(r.model),)).copy())
        heads = {part: counts(r.engine).get(part, 0) for part in HEAD}
        assert heads == dict.fromkeys(HEAD, 0 if where == api.FUSE_NOWHERE else 1)
        r.close()
    assert 0 < np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < 5e-3


def predicted(path: str) -> dict[str, int]:
    """Return how many parts a step of one row has, as `draftwood doctor` tells them from the file."""
    info = probe_model(path)
    every = range(info.n_layers)
    found = {"experts" if info.n_experts else "feed forward": len(every)}
    found |= dict.fromkeys(DELTA_NET, sum((i + 1) % 4 != 0 for i in every))
    found |= {**dict.fromkeys(ATTENTION, sum((i + 1) % 4 == 0 for i in every)), **dict.fromkeys(HEAD, 1)}
    told = fused.told(header.tensors(path), info)
    assert not told["reason"]
    for part in {each["part"] for each in told["declined"]}:
        layers = {i for each in told["declined"] if each["part"] == part for i in each["layers"]}
        found[{"output head": "product", "output norm": "norm"}.get(part, part)] -= len(layers) or 1
    return {part: n for part, n in found.items() if n}


@pytest.mark.parametrize(
    ("preset", "types", "parts"),
    [
        ("planted-moe", "F16", {}),
        ("planted-moe", "blk.1.ffn_down_exps*=Q5_0,F16", {"experts": 3}),
        ("planted-moe", "blk.1.ffn_down_exps*=IQ4_NL,F16", {"experts": 3}),
        ("planted-moe", "blk.2.ffn_up_exps*=Q8_0,F16", {"experts": 3}),
        ("planted-moe", "blk.0.attn_qkv*=Q5_0,F16", {"delta inputs": 2}),
        ("planted-moe", "*attn_k.*=Q5_0,Q8_0", {"attention inputs": 0}),
        ("planted-moe", "blk.1.ssm_out*=Q5_1,Q8_0", {"delta output": 2, "gates": 2}),
        ("planted-moe", "*attn_output*=Q5_0,Q8_0", {"attention output": 0}),
        ("planted-dense", "blk.3.ffn_gate*=Q8_0,F16", {"feed forward": 3}),
        ("moe-mtp", "output.weight=Q5_0,F16", {"product": 0}),
        ("moe-mtp", "output.weight=IQ3_S,F16", {}),
    ],
)  # fmt: skip
def test_a_tensor_of_another_type_concerns_its_part_alone(gguf, preset, types, parts):
    """And `draftwood doctor` says so from the file; the text is the same with drafts and without."""
    path, texts = gguf(preset, types=types), []
    own = {"feed forward" if preset == "planted-dense" else "experts": 4}
    gates = 3 if types.endswith("Q8_0") else 0  # no part of its own, which `draftwood doctor` would name
    whole = {**own, **dict.fromkeys(DELTA_NET, 3), **dict.fromkeys((*ATTENTION, *HEAD), 1), "gates": gates}
    expected = {part: n for part, n in {**whole, **parts}.items() if n}
    for way in ({"speculation": "off"}, {"speculation": "mtp"}, {"speculation": "tree", "tree_budget": 8}):
        llm = Llama(path, n_ctx=256, verbose=False, n_threads=1, flash_attn=True, **way)
        api.fuse(llm._engine, api.FUSE_EVERYWHERE)
        texts.append([text(llm, 24, temp=temp) for temp in (0.0, 0.8)])
        if way["speculation"] == "off":
            found = counts(llm._engine)
            found.pop("attention gates", None)  # no part of its own either
            assert found == expected
            assert predicted(path) == {part: n for part, n in expected.items() if part != "gates"}
        else:
            assert counts(llm._engine)["delta inputs"] == expected["delta inputs"]
            assert llm._engine.stats().drafted > 0
        llm.close()
    assert texts[0] == texts[1] == texts[2]


ADAPTERS = {  # of TINY, and what is left of OF_TINY beside one
    "experts": ({"blk.1.ffn_down_exps": (16, 256, 32)}, {"experts": 11}),
    "shared expert": ({"blk.0.ffn_up_shexp": (64, 256)}, {"experts": 11}),
    "attention": (
        {"blk.3.attn_q": (1024, 256), "blk.7.attn_output": (256, 512)},
        {"attention inputs": 2, "attention heads": 2, "attention output": 2},
    ),
    "delta net": (
        {"blk.0.attn_gate": (256, 256), "blk.1.ssm_alpha": (2, 256), "blk.2.ssm_out": (256, 256)},
        {"delta inputs": 7, "delta output": 8},
    ),
}


@pytest.mark.parametrize("what", ADAPTERS)
def test_a_lora_between_requests_concerns_its_parts_while_it_is_there(plain, tmp_path, what):
    """Its text is that of llama.cpp's nodes, with drafts and without; behind it all is as before."""
    shapes, parts = ADAPTERS[what]
    write_lora(tmp_path / "lora.gguf", shapes, architecture="qwen35moe")
    ways = [("off", api.FUSE_NOWHERE), *((way, api.FUSE_EVERYWHERE) for way in ("off", "mtp", "tree"))]
    with_lora = []
    for way, where in ways:
        llm = load(where, speculation=way)
        adapter = native.llama_adapter_lora_init(llm._model.model, str(tmp_path / "lora.gguf").encode())
        assert adapter
        assert text(llm, 24, temp=0.0) == plain[0.0]
        for scale in (8.0, None):
            set_lora(llm, adapter, scale)
            llm.reset()
            found = text(llm, 24, temp=0.0)
            if (way, where) == ("off", api.FUSE_EVERYWHERE):
                assert counts(llm._engine) == (OF_TINY if scale is None else {**OF_TINY, **parts})
            if scale is not None:
                with_lora.append(found)
        assert found == plain[0.0]
        llm.close()
    assert with_lora == [with_lora[0]] * len(ways)
    assert with_lora[0] != plain[0.0], "the adapter acts"


def test_a_lora_of_the_head_keeps_it_llama_cpps(gguf, tmp_path):
    write_lora(tmp_path / "lora.gguf", {"output": (384, 256)}, architecture="qwen35moe")
    llm = Llama(gguf("planted-moe"), n_ctx=256, verbose=False, lora_path=str(tmp_path / "lora.gguf"))
    api.fuse(llm._engine, api.FUSE_EVERYWHERE)
    text(llm, 2, temp=0.0)
    assert "product" not in counts(llm._engine)
    assert counts(llm._engine)["experts"] == 4
    llm.close()


def set_lora(llm: Llama, adapter, scale: float | None) -> None:
    n = 0 if scale is None else 1
    adapters = (native.llama_adapter_lora_p_ctypes * 1)(adapter)
    scales = (ctypes.c_float * 1)(scale or 0.0)
    assert (
        native.llama_set_adapters_lora(llm._ctx.ctx, adapters if n else None, n, scales if n else None) == 0
    )


def test_prompts_and_gpus_alone_stay_llama_cpps(rig):
    r = rig(TINY, flash=True)
    r.engine.eval(PROMPT, 0)
    assert not counts(r.engine)  # on a CPU nobody asked for it
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval([*PROMPT, *PROMPT], len(PROMPT))
    assert counts(r.engine) == {"product": 1}  # of one row, the last
    r.engine.eval(PROMPT, 3 * len(PROMPT))
    assert counts(r.engine) == OF_TINY


def test_who_looks_at_nodes_sees_llama_cpps(rig):
    seen = []

    @native.ggml_backend_sched_eval_callback
    def look(tensor, ask, _):
        seen.append(ask)
        return False

    r = rig(TINY, cb_eval=look)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT, 0)
    assert seen
    assert not counts(r.engine)


def test_without_exact_rows_nothing_is_fused(rig):
    r = rig(TINY, exact_rows=0, drafter=_capi.DRAFTER_NONE)
    r.engine.eval(PROMPT, 0)
    assert not counts(r.engine)


def decode(r, rows: list[tuple[int, int, int]]) -> None:
    """Decode (token, position, sequence) in one batch, each with logits, past the engine."""
    batch = native.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    assert native.llama_decode(r.ctx, batch) == 0
    native.llama_batch_free(batch)


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
def test_two_sequences_in_a_batch(rig, flash, unified):
    """Their states lie in two cells, which llama.cpp copies; what follows is near what its own nodes give."""
    rows = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        r = rig(TINY, n_seq_max=2, n_ctx=512, flash=flash, kv_unified=unified)
        api.fuse(r.engine, where)
        for sequence in (1, 0):
            decode(r, [(token, i, sequence) for i, token in enumerate(PROMPT[: 5 + sequence])])
        for step in range(3):
            decode(r, [(7 + step, 5 + step, 0), (9 + step, 6 + step, 1)])
        assert bool(counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        assert "delta front" not in counts(r.engine)
        decode(r, [(3, 9, 1)])
        assert ("delta front" in counts(r.engine)) == (where == api.FUSE_EVERYWHERE)
        decode(r, [(4, 8, 0), (5, 10, 1)])
        heads = 3 if flash and where == api.FUSE_EVERYWHERE else 0
        assert counts(r.engine).get("attention heads", 0) == heads
        rows.append(np.array([r.logits(0), r.logits(1)]))
        r.close()
    assert 0 < np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0]) < 5e-3


@pytest.mark.parametrize("guess", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("kind", POOLED)
def test_experts_in_a_pool_are_those_of_one_memory(gguf, kind, guess):
    """The same rows bit for bit at any number of slots, and every layer of it is fused."""
    path = gguf("moe-mtp", experts=16, top_k=3, **POOLED[kind])
    batches = [1, 1, 4, 1, 16, 2]
    found = {}
    for slots in (None, 0, 1, 4, 8, 15):
        pool = None if slots is None else ExpertPool(slots, guess=guess)
        r = Rig(path, pool=pool)
        api.fuse(r.engine, api.FUSE_EVERYWHERE)
        found[slots] = rows_of(r, TOKENS, batches)
        found_parts = counts(r.engine)
        assert found_parts["experts"] == LAYERS, slots
        assert found_parts.get("guesses", 0) == (LAYERS - 1 if guess and slots else 0), slots
        r.engine.eval(TOKENS[:16], len(TOKENS))
        assert counts(r.engine)["experts"] == LAYERS
        assert "guesses" not in counts(r.engine)  # of more than 8 rows
        misses = pool.stats().misses if pool else 0
        assert (misses > 0) == bool(slots)
        r.close()
        if pool:
            pool.close()
    assert all(np.array_equal(rows, found[None]) for rows in found.values())


def test_guesses_of_layers_that_are_and_are_not_fused(gguf):
    """Layer 1 has a type without products of ours: its guesses are a node, those of the others are not."""
    path = gguf("moe-mtp", experts=16, top_k=3, types="blk.1.ffn_down_exps*=Q5_0,F16")
    found = {}
    for slots in (None, 4, 15):
        pool = None if slots is None else ExpertPool(slots, guess=True)
        r = Rig(path, pool=pool)
        api.fuse(r.engine, api.FUSE_EVERYWHERE)
        found[slots] = rows_of(r, TOKENS, [1, 1, 4, 1, 2, 1, 1])
        assert counts(r.engine)["experts"] == LAYERS - 1
        assert counts(r.engine).get("guesses", 0) == (LAYERS - 2 if pool else 0)
        assert not pool or pool.stats().guessed > 0
        r.close()
        if pool:
            pool.close()
    assert all(np.array_equal(rows, found[None]) for rows in found.values())


def test_a_pool_of_few_experts_stays_llama_cpps(gguf):
    """A row of sorted experts has no room for the weights."""
    pool = ExpertPool(2)
    r = Rig(gguf("moe-mtp", experts=4, top_k=3), pool=pool)
    api.fuse(r.engine, api.FUSE_EVERYWHERE)
    r.engine.eval(PROMPT[:4], 0)
    assert "experts" not in counts(r.engine)
    assert "delta inputs" in counts(r.engine)
    r.close()
    pool.close()


@pytest.mark.parametrize("types", [{}, Q8], ids=["", "Q8_0"])
def test_keys_of_a_targets_features_are_fused(types):
    """Those of all layers of a DFlash drafter at once; it guesses as before."""
    guesses = []
    for where in (api.FUSE_NOWHERE, api.FUSE_EVERYWHERE):
        llm = load(where, **WAYS["dflash"], **types)
        llm._engine.eval(TOKENS[:9], 0)
        held = ctypes.c_void_p()
        api.check(_capi.lib.dw_drafter_memory(llm._engine._handle, ctypes.byref(held)))  # it takes what waits
        found = {part: n for part, n in api.fused(llm._engine, of_drafter=True).items() if n}
        assert found == ({"feature keys": 3, "product": 1} if where == api.FUSE_EVERYWHERE else {})
        text(llm, 48, temp=0.0)
        stats = llm._engine.stats()
        guesses.append((stats.rounds, stats.drafted, stats.accepted))
        llm.close()
    assert guesses[0] == guesses[1]
    assert guesses[0][2] > 20
