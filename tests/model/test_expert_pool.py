"""A pool of experts on a CPU: rows as of a model in one memory, and a policy as its model in Python says.

The slots are plain memory here, so the whole of it runs where there is no card; tests/gpu has the rest.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.bench.expert_replay import Slots
from draftwood.engine import _capi
from draftwood.engine.experts import ExpertPool
from draftwood.errors import OptionError

from tests.model.engine.calls import error_of, lib
from tests.model.rig import PROMPT, Rig, follow
from tests.ops import ggml_graph as ggml

E, K, LAYERS = 16, 3, 4
SHAPE = {"experts": E, "top_k": K}
TOKENS = 60
TEXT = [(7 * i * i + 3 * i) % 380 + 1 for i in range(200)]


@pytest.fixture
def pooled(gguf):
    """pooled(slots, policy=..., **fields of the model) -> a rig whose experts lie in a pool, and the pool."""
    made = []

    def make(n_slots, policy="frequency", heat=None, settings=None, guess=False, **changes):
        pool = ExpertPool(n_slots, policy=policy, guess=guess)
        pool.set_heat(heat or {})
        rig = Rig(gguf("moe-mtp", **{**SHAPE, **changes}), pool=pool, **(settings or {}))
        made.append((rig, pool))
        return rig, pool

    yield make
    for rig, pool in made:
        rig.close()
        pool.close()


class Choices:
    """An eval callback that keeps what each router chose, k experts a row by layer. It counts our nodes."""

    def __init__(self):
        self.by_layer = [[] for _ in range(LAYERS)]
        self.n_ours = 0
        self.callback = native.ggml_backend_sched_eval_callback(self.read)

    def read(self, tensor, ask, _user):
        whole = ggml.base.ggml_get_name(tensor).decode()
        name, _, layer = whole.rpartition("-")
        self.n_ours += whole.startswith("dw_expert_slots")
        if name != "ffn_moe_argsort":
            return not ask
        if not ask:
            n_bytes = ggml.base.ggml_nbytes(tensor)
            order = np.empty((n_bytes // 4 // E, E), np.int32)
            ggml.base.ggml_backend_tensor_get(tensor, order.ctypes.data_as(ctypes.c_void_p), 0, n_bytes)
            self.by_layer[int(layer)] += order[:, :K].tolist()
        return True


def rows_of(rig, tokens, batches):
    """Return all rows of logits, f32[n, n_vocab], of tokens that go through the engine in such batches."""
    rig.engine.reset()
    rows, at = [], 0
    for n in batches:
        rig.engine.eval(tokens[at : at + n], at, all_logits=True)
        rows += [rig.logits(i) for i in range(n)]
        at += n
    return np.stack(rows)


SLOTS = [0, 1, K + 1, E // 2, E - 1, E]
TYPES = {
    "f16": {},
    "q8_0": {"types": "Q8_0"},
    "q4_k and q6_k": {"types": "*down_exps*=Q6_K,Q4_K", "width": 256, "expert_ff": 256},
    "merged": {"merged_experts": True, "types": "Q8_0"},
}


@pytest.mark.parametrize("guess", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("changes", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("slots", SLOTS)
def test_rows_are_those_of_a_model_in_one_memory(pooled, rig, gguf, slots, changes, guess):
    batches = [1, 1, 5, 1, 16, 40, 70, 1, 1, 2]
    plain = rig(gguf("moe-mtp", **{**SHAPE, **changes}))
    ours, pool = pooled(slots, guess=guess, **changes)
    assert np.array_equal(rows_of(ours, TEXT, batches), rows_of(plain, TEXT, batches))
    stats = pool.stats()
    if slots == 0:
        assert (stats.layers, stats.hits, stats.misses) == (LAYERS, 0, 0)
        return
    assert stats.layers == LAYERS
    assert stats.slots == slots * LAYERS
    assert (stats.misses > 0) == (slots < E)
    assert (stats.in_place > 0) == (slots < E)
    assert stats.steps == len(batches)
    beside = LAYERS - 1  # the last one has no layer behind it that would tell
    assert stats.layers_beside == (beside if guess else 0)
    assert (stats.guessed > 0) == (guess and slots < E)
    assert stats.right <= stats.guessed


def test_guesses_are_often_right(pooled):
    """The next router's choice from this layer's input: more often right than chance, which is K of E."""
    ours, pool = pooled(E // 2, guess=True)
    rows_of(ours, TEXT, [1] * 120)
    stats = pool.stats()
    assert stats.guessed > 100
    assert stats.right / stats.guessed > 1.5 * K / E


def test_a_graph_that_is_watched_keeps_its_order(pooled):
    """It runs in pieces, so a copy could be left without what waits for it."""
    choices = Choices()
    watched, pool = pooled(E // 2, guess=True, settings={"cb_eval": choices.callback})
    rows_of(watched, TEXT, [1])
    assert pool.stats().layers_beside == 0
    assert pool.stats().guessed == 0


@pytest.mark.parametrize(("rows", "guesses"), [(8, True), (9, False)])
def test_how_many_rows_guess(pooled, rows, guesses):
    ours, pool = pooled(E // 2, guess=True)
    rows_of(ours, TEXT, [rows, rows])
    assert (pool.stats().guessed > 0) is guesses


class Lru:
    """The policy in a few lines: what was used longest ago goes."""

    def __init__(self, slots):
        self.slots = slots
        self.cache = OrderedDict((e, None) for e in range(slots - 1, -1, -1))  # expert 0 is worth most
        self.hits = self.misses = 0

    def step(self, chosen):
        for expert in chosen:
            self.hits += expert in self.cache
            self.misses += expert not in self.cache
        for expert in chosen:
            self.cache[expert] = None
            self.cache.move_to_end(expert)
        while len(self.cache) > self.slots:
            self.cache.popitem(last=False)


def run_one_by_one(pooled, slots, policy, n):
    """Return the pool and what its routers chose, after n tokens of TEXT, each in a step of its own."""
    choices = Choices()
    ours, pool = pooled(slots, policy, settings={"cb_eval": choices.callback})
    rows_of(ours, TEXT, [1] * n)
    assert all(np.shape(layer) == (n, K) for layer in choices.by_layer)
    assert choices.n_ours > 0
    return pool, choices.by_layer


@pytest.mark.parametrize("slots", [K, E // 4, E // 2, E - 1])
def test_hits_are_those_of_an_lru_cache(pooled, slots):
    pool, choices = run_one_by_one(pooled, slots, "lru", 120)
    for layer in range(LAYERS):
        model = Lru(slots)
        for token in choices[layer]:
            model.step(token)
        found = pool.layer(layer)
        assert (found.hits, found.misses, found.in_place) == (model.hits, model.misses, 0)
        assert {e for e, slot in enumerate(found.slot_of) if slot >= 0} == set(model.cache)


@pytest.mark.parametrize("slots", [E // 4, E // 2])
def test_the_least_used_expert_goes(pooled, slots):
    pool, choices = run_one_by_one(pooled, slots, "frequency", 150)  # two epochs
    for layer in range(LAYERS):
        model = Slots(E, slots)
        for token in choices[layer]:
            model.step(token)
        found = pool.layer(layer)
        assert (found.hits, found.misses) == (model.hits, model.misses)
        assert {e for e, slot in enumerate(found.slot_of) if slot >= 0} == model.resident
        assert found.heat == tuple(model.hot(e) for e in range(E))


def test_every_slot_holds_its_expert_once(pooled):
    ours, pool = pooled(E // 2)
    rows_of(ours, TEXT, [1, 9, 1, 64, 1])
    for layer in range(LAYERS):
        used = [slot for slot in pool.layer(layer).slot_of if slot >= 0]
        assert sorted(used) == list(range(E // 2))


def test_a_prompt_evicts_nothing_and_warms(pooled):
    ours, pool = pooled(E // 2, settings={"n_ubatch": 128, "n_ctx": 512})
    before = [pool.layer(layer).slot_of for layer in range(LAYERS)]
    ours.engine.eval(TEXT[:100], 0)
    after = [pool.layer(layer) for layer in range(LAYERS)]
    assert [layer.slot_of for layer in after] == before
    assert all(layer.misses == 0 and layer.in_place > 0 for layer in after)
    assert all(sum(layer.heat) > 0 for layer in after)


def test_the_hottest_experts_begin_in_the_slots(pooled):
    """An engine's context reserves its graphs before it decodes, and layers enter with them."""
    heat = {1: [0] * E, 2: list(range(E))}
    heat[1][9], heat[1][2], heat[1][14] = 512, 256, 1024
    _, pool = pooled(3, heat=heat)
    slots = [pool.layer(layer).slot_of for layer in range(LAYERS)]
    assert [slots[1].index(slot) for slot in range(3)] == [14, 9, 2]
    assert [slots[2].index(slot) for slot in range(3)] == [15, 14, 13]
    assert [slots[0].index(slot) for slot in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("slots", [2 * K, E // 2])
def test_drafts_give_the_plain_text(pooled, gguf, slots):
    """Every accepted length, with experts that come and go."""
    plain = Rig(gguf("moe-mtp", **SHAPE))
    run = plain.reference(TOKENS + 8)
    plain.close()
    ours, pool = pooled(slots)
    assert ours.start() == run.tokens[0]
    done, accept = 1, 0
    while done < TOKENS:
        done = follow(ours, run, done, accept % 6)
        accept += 1
    assert pool.stats().misses > 0


def test_a_pool_takes_a_second_model_after_the_first(gguf, rig):
    """Other tensors at other places, of another size: nothing of the first model is left."""
    pool = ExpertPool(E // 2)
    for changes in ({}, {"types": "Q8_0"}, {"layers": 5, "experts": 2 * E}):
        path = gguf("moe-mtp", **{**SHAPE, **changes})
        plain, ours = rig(path), Rig(path, pool=pool)
        assert np.array_equal(rows_of(ours, TEXT, [1, 5, 1]), rows_of(plain, TEXT, [1, 5, 1]))
        assert pool.stats().layers == changes.get("layers", LAYERS)
        assert pool.stats().misses > 0
        ours.close()
        assert (pool.stats().layers, pool.stats().host_bytes, pool.stats().device_bytes) == (0, 0, 0)
    pool.close()


def test_a_load_that_fails_leaves_a_pool_that_works(gguf, rig, tmp_path):
    pool = ExpertPool(E // 2)
    whole = gguf("moe-mtp", **SHAPE)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(whole).read_bytes().replace(b"blk.2.attn_gate.weight", b"blk.2.attn_gatx.weight"))
    with pytest.raises(AssertionError):
        Rig(str(broken), pool=pool)
    plain, ours = rig(whole), Rig(whole, pool=pool)
    assert np.array_equal(rows_of(ours, TEXT, [1, 5, 1]), rows_of(plain, TEXT, [1, 5, 1]))
    ours.close()
    pool.close()


def test_without_a_pool_no_graph_has_the_op(rig, gguf):
    choices = Choices()
    r = rig(gguf("moe-mtp", **SHAPE), cb_eval=choices.callback)
    r.start(PROMPT)
    assert choices.n_ours == 0
    assert np.shape(choices.by_layer) == (LAYERS, len(PROMPT), K)


def test_a_pool_of_another_device_is_refused():
    with pytest.raises(OptionError, match="no device CUDA99"):
        ExpertPool(4, device="CUDA99")


@pytest.mark.parametrize("n_slots", [-1, 1 << 21])
def test_slots_have_a_range(n_slots):
    with pytest.raises(OptionError, match="n_slots is"):
        ExpertPool(n_slots)


def test_a_layer_that_is_not_there_is_refused(pooled):
    _, pool = pooled(2)
    with pytest.raises(OptionError, match="layer 99 has no experts"):
        pool.layer(99)


def native_params(**changes):
    raw = _capi.ExpertParams()
    lib.dw_expert_params_init(ctypes.byref(raw))
    for name, value in changes.items():
        setattr(raw, name, value)
    return raw


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policy": 7}, "policy is 7"),
        ({"struct_size": 3}, "dw_expert_params has struct_size 3"),
        ({"device": None}, "dw_expert_pool_new was given a null pointer"),
        ({"device": b""}, "there is no device"),
    ],
)
def test_what_is_no_pool_is_refused(changes, text):
    pool = _capi.PoolHandle()
    raw = native_params(**changes)
    assert text in error_of(lib.dw_expert_pool_new(ctypes.byref(raw), ctypes.byref(pool)), _capi.ERR_ARGUMENT)
    assert not pool


def test_null_pointers():
    pool, raw = ExpertPool(2), native_params()
    heat = (ctypes.c_uint32 * 4)()
    stats, layer = _capi.ExpertStats(), _capi.ExpertLayer()
    calls = {
        "dw_expert_pool_new": [ctypes.byref(raw), ctypes.byref(_capi.PoolHandle())],
        "dw_expert_set_heat": [pool._handle, 0, heat, 4],
        "dw_expert_get_stats": [pool._handle, ctypes.byref(stats)],
        "dw_expert_get_layer": [pool._handle, 0, ctypes.byref(layer)],
    }
    for name, good in calls.items():
        for i, value in enumerate(good):
            if not isinstance(value, int):
                status = getattr(lib, name)(*good[:i], None, *good[i + 1 :])
                assert f"{name} was given a null pointer" in error_of(status, _capi.ERR_ARGUMENT)
    assert lib.dw_expert_pool_buffer_type(None) is None
    lib.dw_expert_params_init(None)
    lib.dw_expert_pool_free(None)


@pytest.mark.parametrize(("layer", "n"), [(-1, 4), (0, 0), (0, 1025), (0, -3)])
def test_heat_has_a_range(layer, n):
    pool = ExpertPool(2)
    status = lib.dw_expert_set_heat(pool._handle, layer, (ctypes.c_uint32 * 4)(), n)
    assert "expected a layer of 1 to 1024 experts" in error_of(status, _capi.ERR_ARGUMENT)


def test_structs_of_another_size_are_refused(pooled):
    _, pool = pooled(2)
    for call, struct in (
        ("dw_expert_get_stats", _capi.ExpertStats),
        ("dw_expert_get_layer", _capi.ExpertLayer),
    ):
        raw = struct()
        between = [0] if struct is _capi.ExpertLayer else []
        status = getattr(lib, call)(pool._handle, *between, ctypes.byref(raw))
        assert "has struct_size 0" in error_of(status, _capi.ERR_ARGUMENT)
