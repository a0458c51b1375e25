"""DFlash drafting: the same text, real acceptance on the trained model, and drafters that do not fit."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import pytest
from draftwood import Llama, ModelFileError, OptionError, UnsupportedError
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from bench.models import heldout_prompts
from tests.model.rig import Rig

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
TARGET, DRAFTER = MODELS / "tiny-moe-f16.gguf", MODELS / "dflash-f16.gguf"
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n\ndef "


@pytest.fixture
def llama():
    made = []

    def make(**settings):
        defaults = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "seed": 3, "verbose": False}
        made.append(Llama(str(TARGET), **{**defaults, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def text(llm, n=120, **sampling):
    llm.reset()
    return list(islice(llm.generate(llm.tokenize(PROMPT.encode()), **sampling), n))


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("draft_tokens", [1, 4, 15, 40])
def test_the_same_text(llama, draft_tokens, temp):
    off = llama(speculation="off")
    on = llama(speculation="dflash", drafter=DRAFTER, draft_tokens=draft_tokens)
    assert on.speculation == "dflash"
    expected = text(off, temp=temp)
    assert text(on, temp=temp) == expected
    assert text(on, temp=temp) == expected, "after a reset"
    assert len(on.speculation_stats.drafted_by_depth) == min(draft_tokens, 15), "a block is 16 positions"


def test_it_drafts_well(llama):
    """A feeding one position off, or of the wrong layers, would be exact too, and useless."""
    on = llama(speculation="dflash", drafter=DRAFTER, draft_tokens=4)
    text(on, 200, temp=0.0)
    assert on.speculation_stats.tokens_per_round > 1.8
    assert on.speculation_stats.cold_rounds == 0


@pytest.mark.parametrize("part", ["features", "block"])
def test_drafts_that_fail_are_counted_apart_from_cold_rounds(part):
    """The first decode of a draft reads features, the second one fills the block."""
    r = Rig(TARGET, drafter=_capi.DRAFTER_DFLASH, engine=False)
    run, nodes, last = [], [], 1 << 30
    r.params.abort_callback = native.ggml_abort_callback(lambda _: bool(nodes.append(0)) or len(nodes) > last)
    r.settings["drafter_path"] = str(DRAFTER)
    r.attach()
    run = [r.start()]

    def drafted():
        nodes.clear()
        n_drafts = r.engine.propose(run[-1])
        r.engine.verify()
        while r.engine.row() is not None:
            run.append(r.sample()[0])
        r.engine.commit()
        return n_drafts

    try:
        assert [drafted(), drafted()] == [5, 5]
        last = 2 if part == "features" else len(nodes) - 10
        assert drafted() == 0
        last = 1 << 30
        assert drafted() == 5
        stats = r.engine.stats()
        assert (stats.failed_drafts, stats.cold_rounds) == (1, 0)
        assert run == r.reference(len(run)).tokens
    finally:
        r.close()


def test_draft_p_min_cuts(llama):
    both = {"speculation": "dflash", "drafter": DRAFTER, "draft_tokens": 8}
    every, sure = (llama(**both, draft_p_min=p) for p in (0.0, 0.5))
    assert text(sure) == text(every)
    assert sure.speculation_stats.drafted < every.speculation_stats.drafted


def test_going_back_and_on(llama):
    """A second prompt that shares a beginning, and one that goes on: the drafter's cache follows."""
    off, on = llama(speculation="off"), llama(drafter=DRAFTER)
    for prompt in (PROMPT, PROMPT + "write", PROMPT + "write_lines(", "import os\n"):
        texts = []
        for llm in (off, on):
            texts.append(list(islice(llm.generate(llm.tokenize(prompt.encode()), temp=0.0), 40)))
        assert texts[0] == texts[1]


def without_sections(folder):
    """Return the drafter as a file whose tokens have one position each, so that its cache takes no gaps."""
    return rewrite(DRAFTER, folder / "plain.gguf", drop=("dflash.rope.dimension_sections",))


def with_windows(folder, n=64, layers=(True, False, True)):
    """Return the drafter as a file whose attention reaches n positions back in some layers."""
    name = "dflash.attention.sliding_window"
    keys = {name: n, f"{name}_pattern": list(layers)}
    return rewrite(DRAFTER, folder / "windows.gguf", add_keys=keys)


def heldout(llm, n):
    """Return n tokens of a text that does not repeat itself."""
    return next(ids for category, ids in heldout_prompts(llm, 8, n) if category == "python")


def drafts(engine, story, first, last):
    """Return what the engine drafts after each of these positions of a text, as the text goes on."""
    found = []
    for at in range(first, last):
        engine.propose(story[at], 4)
        found.append(engine.draft())
        engine.propose_given(story[at], [])
        engine.verify()
        engine.commit()
    return found


def same_first_tokens(one, other):
    return np.mean([a[:1] == b[:1] for a, b in zip(one, other, strict=True)])


@pytest.mark.parametrize("sections", [True, False], ids=["gaps", "no gaps"])
@pytest.mark.parametrize("prompt", [100, 180])
def test_a_long_pause(llama, tmp_path, prompt, sections):
    """Older features are given up while others draft. Drafts from the newest ones are much the same."""
    drafter = DRAFTER if sections else without_sections(tmp_path)
    paused, steady = (llama(speculation="dflash", drafter=drafter) for _ in range(2))
    story = heldout(paused, 380)  # the drafter was trained up to 384
    for llm in (paused, steady):
        llm._engine.eval(story[:prompt], 0)
    for token in story[prompt:340]:
        paused._engine.propose_given(token, [])
        paused._engine.verify()
        paused._engine.commit()
    drafts(steady._engine, story, prompt, 340)
    behind, expected = (drafts(llm._engine, story, 340, 379) for llm in (paused, steady))
    assert same_first_tokens(behind, expected) > 0.6
    assert same_first_tokens(behind, expected[1:] + expected[:1]) < 0.4, "else any drafts would do"
    stats = paused.speculation_stats
    assert (stats.cold_rounds, stats.failed_drafts) == (0, 0)


@pytest.mark.parametrize("pieces", [[128, 1], [110, 20], [64] * 4])
def test_a_prompt_in_pieces(llama, pieces):
    """All of it is drafted from, however it came."""
    llms = [llama(speculation="dflash", drafter=DRAFTER) for _ in range(2)]
    story = heldout(llms[0], sum(pieces) + 1)
    at = 0
    for n in pieces:
        llms[0]._engine.eval(story[at : at + n], at)
        at += n
    llms[1]._engine.eval(story[:at], 0)
    found = [drafts(llm._engine, story, at, at + 1) for llm in llms]
    assert found[0] == found[1]


def test_a_loaded_state_is_drafted_from(llama):
    """The drafter has not seen that text: it drafts from what follows."""
    off, on = llama(speculation="off"), llama(speculation="dflash", drafter=DRAFTER)
    texts = []
    for llm in (off, on):
        text(llm, 20, temp=0.0)
        state = llm.save_state()
        text(llm, 5, temp=0.8)
        llm.load_state(state)
        stream = llm.generate([*state.input_ids[: state.n_tokens].tolist(), 5], temp=0.0)
        texts.append(list(islice(stream, 60)))
    assert texts[0] == texts[1]
    assert on.speculation_stats.cold_rounds <= 1
    assert on.speculation_stats.accepted > 0


# --- drafters that do not fit ---------------------------------------------------------------------------


def copy_keys(reader, writer, *, change=None, drop=()):
    """Copy metadata but the architecture, changed by change(name, value), some left out."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in drop:
            continue
        value = field.contents()
        value = change(name, value) if change else value
        kind = field.types[0]
        writer.add_key_value(
            name, value, kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )


def rewrite(path, out, *, change=None, drop=(), add_keys=None, add_tensors=None):
    """Copy a GGUF with its metadata as copy_keys does, and some more."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    copy_keys(reader, writer, change=change, drop=drop)
    for name, value in (add_keys or {}).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, data in (add_tensors or {}).items():
        writer.add_tensor(name, data)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def refused(llama, path, error=UnsupportedError):
    with pytest.raises(error) as caught:
        llama(speculation="dflash", drafter=path)
    return str(caught.value)


def test_a_block_longer_than_any_verify(llama, tmp_path):
    """What a prompt leaves to be fed fits no size whose graph is kept."""
    change = {"dflash.block_size": 128}
    long = rewrite(DRAFTER, tmp_path / "long.gguf", change=lambda name, value: change.get(name, value))
    texts = []
    for drafter in (DRAFTER, long):
        llm = llama(drafter=str(drafter))
        texts.append(list(islice(llm.generate(list(range(300, 400)), temp=0.0), 40)))
    assert texts[0] == texts[1]


def test_a_copy_fits(llama, tmp_path):
    """The rewriting below is not what is refused."""
    on = llama(drafter=rewrite(DRAFTER, tmp_path / "same.gguf"))
    assert len(text(on, 10)) == 10


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("dflash.target_layers", [1, 4, 7, 9, 40], "reads layer 40 of its target"),
        ("dflash.target_layers", [1, 4, 7], "cannot be loaded"),
        ("dflash.block_size", 1, "block_size is 1; expected 2 to 4096"),
    ],
)
def test_another_shape(llama, tmp_path, name, value, found):
    path = rewrite(DRAFTER, tmp_path / "d.gguf", change=lambda n, old: value if n == name else old)
    assert found in refused(llama, path)


@pytest.mark.parametrize("key", ["hyper_connection.count", "selector_rank", "sample_from_anchor"])
def test_kin_with_other_layouts(llama, tmp_path, key):
    """llama.cpp would read these, and end the process at an assertion of its loader or graph."""
    path = rewrite(DRAFTER, tmp_path / "d.gguf", add_keys={f"dflash.{key}": 2})
    assert f"has dflash.{key}, as DFlash2 and DSpark do" in refused(llama, path)


@pytest.mark.parametrize("name", ["markov_w1.weight", "d2t"])
def test_tensors_of_other_kinds(llama, tmp_path, name):
    path = rewrite(DRAFTER, tmp_path / "d.gguf", add_tensors={name: np.zeros((4, 4), np.float32)})
    assert f"has a tensor {name}; expected a plain DFlash" in refused(llama, path)


def test_a_number_that_is_none(llama, tmp_path):
    key = "dflash.rope.scaling.yarn_beta_fast"  # llama.cpp does not look at it
    path = rewrite(DRAFTER, tmp_path / "d.gguf", add_keys={key: "fast"})
    assert f"{key} is 'fast'; expected a number" in refused(llama, path)


def test_another_vocabulary(llama, tmp_path):
    def change(name, value):
        if name == "tokenizer.ggml.tokens":
            value = list(value)
            value[1000] = "another"
        return value

    assert "token 1000 is 'another' to the drafter" in refused(
        llama, rewrite(DRAFTER, tmp_path / "d.gguf", change=change)
    )


def test_no_mask_token(llama, tmp_path):
    path = rewrite(DRAFTER, tmp_path / "d.gguf", drop=("tokenizer.ggml.mask_token_id",))
    assert "no mask token" in refused(llama, path)


def test_a_target_is_no_drafter(llama):
    assert "architecture 'qwen35moe'; expected 'dflash'" in refused(llama, TARGET)


def test_a_drafter_is_no_target():
    with pytest.raises(ValueError, match="dflash"):
        Llama(str(DRAFTER), speculation="mtp", verbose=False)


def test_files_that_cannot_be_read(llama, tmp_path):
    assert "Drafter path does not exist" in refused(llama, tmp_path / "none.gguf", ModelFileError)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DRAFTER.read_bytes()[:-1000])
    assert "cut off" in refused(llama, cut, ModelFileError)


def test_options_that_contradict(llama):
    for settings in ({"speculation": "dflash"}, {"speculation": "mtp", "drafter": DRAFTER}):
        with pytest.raises(OptionError):
            llama(**settings)


def test_drafts_go_on_behind_a_pause(llama, monkeypatch):
    """While "auto" does not draft, features wait; more of them than are fed at once too."""
    on = llama(speculation="dflash", drafter=DRAFTER, draft_tokens=4)
    expected = text(llama(speculation="off"), 120)
    propose = on._engine.propose
    monkeypatch.setattr(on._engine, "propose", lambda last: propose(last, 0))
    generator = on.generate(on.tokenize(PROMPT.encode()))
    start = list(islice(generator, 70))
    assert on.speculation_stats.drafted == 0
    monkeypatch.setattr(on._engine, "propose", propose)
    assert start + list(islice(generator, 50)) == expected
    assert on.speculation_stats.cold_rounds == 0
    assert on.speculation_stats.tokens_per_round > 1.1


def test_sequences_share_the_drafter():
    """Each drafts what it drafts in a context of its own; who comes and goes changes nothing for others."""
    prompts = [(3, 141, 59, 26, 53), (7, 8, 9), tuple(range(100, 140))]
    settings = {
        **{"drafter": _capi.DRAFTER_DFLASH, "drafter_path": str(DRAFTER)},
        **{"draft_tokens": 4, "draft_p_min": 0.0, "exact_rows": 64},
    }

    def written(engine, sampler, prompt, n=30):
        engine.reset()
        engine.eval(prompt, 0)
        tokens, drafts = [engine.next(sampler)], []
        while len(tokens) < n:
            engine.propose(tokens[-1])
            drafts.append(engine.draft())
            engine.verify()
            while engine.row() is not None:
                tokens.append(engine.next(sampler))
            engine.commit()
        return tokens, drafts

    alone = Rig(TARGET, engine=False)
    lone = Engine(alone.ctx, alone.params, **settings)
    expected = [written(lone, alone.sampler, prompt) for prompt in prompts]
    held = lone.stats().drafter_bytes
    lone.close()
    alone.close()
    r = Rig(TARGET, engine=False, n_seq_max=3, n_ctx=768)
    engines = [Engine(r.ctx, r.params, **settings, seq_id=seq) for seq in range(3)]
    assert engines[0].stats().drafter_bytes < 3 * held
    for _ in range(2):
        assert [written(*each) for each in zip(engines, [r.sampler] * 3, prompts, strict=True)] == expected
    engines[0].close()
    engines[1].reset()
    assert written(engines[2], r.sampler, prompts[2]) == expected[2]
    again = Engine(r.ctx, r.params, **settings, seq_id=0)
    assert written(again, r.sampler, prompts[0]) == expected[0]
    for each in (again, engines[1], engines[2]):
        each.close()
    r.close()


def test_more_sequences_than_a_block_has_rows():
    """llama.cpp asserts a row of output for each sequence."""
    r = Rig(TARGET, engine=False, n_seq_max=80, n_ctx=256 * 80, n_batch=128)
    settings = {**r.settings, "drafter": _capi.DRAFTER_DFLASH, "drafter_path": str(DRAFTER)}
    engine = Engine(r.ctx, r.params, **settings, seq_id=79)
    engine.eval((3, 141, 59), 0)
    assert engine.propose(engine.next(r.sampler)) > 0
    engine.close()
    r.close()
