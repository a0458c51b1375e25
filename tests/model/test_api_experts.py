"""expert_vram= and expert_heat= of `Llama`: the same text at every size, counters, heat files, refusals."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path

import pytest
from draftwood import ExpertStats, Llama
from draftwood.engine.engine import probe_model
from draftwood.engine.experts import ExpertPool
from draftwood.errors import ClosedError, ExpertMemoryError, ModelFileError, OptionError, UnsupportedError
from draftwood.load import experts
from draftwood.load.experts import IN_PLAIN_MEMORY

from bench.testing_api import limit_expert_host
from tests.model.texts import seeded

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
PROMPT = b"What experts does a model choose?"
SHAPE = {"experts": 16, "top_k": 3, "planted": 0.5}
N = 48


@pytest.fixture
def model(gguf):
    return gguf("moe-mtp", **SHAPE)


@pytest.fixture
def opened(llama_of, model):
    """opened(share of the experts, ...) -> a Llama with so many experts in slots; None: no pool."""

    def make(share, **settings):
        n_bytes = None if share is None else int(share * probe_model(model).expert_bytes)
        return llama_of("moe-mtp", SHAPE, n_ctx=512, expert_vram=n_bytes, **settings)

    return make


def text(llm, seed=None):
    return seeded(llm, N, llm.tokenize(PROMPT), seed)


@pytest.mark.parametrize("speculation", ["off", "mtp", "tree", "auto"])
@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
def test_the_same_text_at_every_size(opened, speculation, seed):
    plain = text(opened(None, speculation="off"), seed)
    for share in (0, 0.25, 0.5, 0.95):
        llm = opened(share, speculation=speculation)
        assert text(llm, seed) == plain, share
        stats = llm.expert_stats
        assert stats.layers == 4
        assert stats.misses > 0


def test_counters(opened):
    llm = opened(0.5, speculation="off")
    text(llm)
    stats = llm.expert_stats
    assert isinstance(stats, ExpertStats)
    assert (stats.layers, stats.slots, stats.experts) == (4, 4 * 8, 4 * 16)
    assert 0.0 < stats.hit_rate < 1.0
    assert stats.to_dict()["hit_rate"] == stats.hit_rate
    assert str(stats) == f"hit_rate={stats.hit_rate:.3g}, {stats!r}"
    assert str(llm.speculation_stats).startswith("tokens_per_round=1, SpeculationStats(rounds=")
    one = probe_model(llm.model_path).expert_bytes // (4 * 16)
    assert stats.bytes_missed == (stats.misses + stats.in_place) * one
    assert stats.host_bytes >= 64 * one
    assert stats.device_bytes >= 32 * one


def test_without_a_pool_there_are_no_counters(opened):
    assert opened(None).expert_stats is None
    assert opened(1.0).expert_stats is None


def test_heat_goes_from_one_run_to_the_next(opened, tmp_path):
    heat = tmp_path / "heat.json"
    first = opened(0.25, speculation="off", expert_heat=str(heat))
    text(first)
    learnt = [first._pool.layer(layer).heat for layer in range(4)]
    first.close()
    assert [tuple(values) for values in json.loads(heat.read_text())["heat"].values()] == learnt
    second = opened(0.25, speculation="off", expert_heat=str(heat))
    for layer in range(4):
        resident = {e for e, slot in enumerate(second._pool.layer(layer).slot_of) if slot >= 0}
        assert resident == set(sorted(range(16), key=lambda e: (-learnt[layer][e], e))[:4])


def test_a_heat_file_that_cannot_be_written_is_refused_at_load(opened, tmp_path):
    heat = str(tmp_path / "none" / "heat.json")
    with pytest.raises(OptionError, match="none, which is no folder"):
        opened(0.25, expert_heat=heat)
    opened(None, expert_heat=heat)  # without a pool nothing is written


def test_a_heat_file_that_cannot_be_written_at_the_end(opened, tmp_path):
    """Its warning, made an error by -W error, leaves nothing open."""
    folder = tmp_path / "folder"
    folder.mkdir()
    llm = opened(0.25, speculation="mtp", expert_heat=str(folder / "heat.json"))
    text(llm)
    engine, pool, stack = llm._engine, llm._pool, llm._stack
    folder.rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"heat.json could not be written \(No such file"):
            llm.close()
    assert not engine._handle
    assert not pool._handle
    assert not stack._exit_callbacks
    with pytest.raises(ClosedError):
        text(llm)
    llm.close()


def test_memory_that_the_system_refuses_is_said_in_words(opened, monkeypatch):
    """As where pinned memory is limited; nothing is left of the load, and the next one works."""

    def limited(*args, **kwargs):
        pool = ExpertPool(*args, **kwargs)
        limit_expert_host(pool, 100_000)
        return pool

    plain = text(opened(None, speculation="off"))
    with monkeypatch.context() as patch:
        patch.setattr(experts, "ExpertPool", limited)
        with pytest.raises(ExpertMemoryError, match=r"the system refused .* of pinned host memory") as error:
            opened(0.5, speculation="off")
    assert "n_cpu_moe=N" in error.value.hint
    assert text(opened(0.5, speculation="off")) == plain
    with pytest.raises(ModelFileError):  # what has another reason is said as before
        Llama(__file__, expert_vram="1MiB", verbose=False)


def test_vram_counts_the_drafter(monkeypatch):
    beside, found = experts.beside, []
    monkeypatch.setattr(experts, "beside", lambda *args: found.append(beside(*args)) or found[-1])
    files = TINY / "tiny-moe-f16.gguf", TINY / "dflash-f16.gguf"
    for drafter in (None, str(files[1])):
        Llama(str(files[0]), n_ctx=256, n_threads=1, vram="8GiB", drafter=drafter, verbose=False).close()
    assert found[1] - found[0] == files[1].stat().st_size


def test_the_header_says_the_models_own_context(gguf):
    assert probe_model(gguf("moe-mtp", context=1536)).n_ctx_train == 1536


def test_a_pool_on_a_cpu_warns_once(opened):
    with pytest.warns(UserWarning, match=IN_PLAIN_MEMORY) as said:
        opened(0.5, speculation="off")
    assert len(said) == 1
    with pytest.warns(UserWarning, match="experts get 0 bytes and take "):
        opened(0, speculation="off")


def test_a_pickled_one_has_its_pool(opened):
    llm = opened(0.5, speculation="off")
    again = pickle.loads(pickle.dumps(llm))
    assert again.expert_stats.slots == llm.expert_stats.slots
    assert text(again) == text(llm)
    again.close()


def test_room_is_asked_for_what_will_run(llama_of, monkeypatch):
    """LangChain's eight tokens a batch are corrected first: the logits of more take card memory."""
    asked, room = [], experts.room
    monkeypatch.setattr(experts, "room", lambda *given: asked.append(given[2]["n_batch"]) or room(*given))
    with pytest.warns(UserWarning, match="n_batch is raised from 8 to 512"):
        llama_of("moe-mtp", SHAPE, rope_freq_base=10000.0, rope_freq_scale=1.0, n_batch=8)
    assert asked == [512]


def test_a_dense_model_is_refused(llama):
    with pytest.raises(UnsupportedError, match="this model has no experts"):
        llama("dense-mtp", expert_vram="1GiB")


@pytest.mark.parametrize("pattern", ["exps", r"blk\..*\.ffn_(gate|up|down)_exps"])
def test_overrides_that_leave_the_pool_nothing_are_refused(opened, pattern):
    with pytest.raises(OptionError, match="beside tensor_buft_overrides that place all experts"):
        opened(0.5, tensor_buft_overrides={pattern: "CPU"})


def test_overrides_of_a_few_experts_leave_the_others(opened):
    some = opened(0.5, speculation="off", tensor_buft_overrides={r"blk\.1\..*_exps": "CPU"})
    assert text(some) == text(opened(None, speculation="off"))
    assert some.expert_stats.layers == 3


def test_sizes_are_checked(llama):
    with pytest.raises(OptionError, match="expert_vram is '6 apples'"):
        llama("moe-mtp", expert_vram="6 apples")


def test_closing_twice_and_using_afterwards(opened):
    llm = opened(0.5)
    llm.close()
    llm.close()
    assert llm.expert_stats is None
