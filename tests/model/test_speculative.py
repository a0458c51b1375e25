"""`Llama(speculative=SpecConfig(...))` drafts as our own arguments do."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import draftwood
import pytest
from draftwood import Llama, OptionError, SpecConfig, SpeculativeType, UnsupportedError

from tests.model.texts import text

ROOT = Path(__file__).resolve().parents[2]


def test_mtp(llama, off):
    llm = llama(speculative=SpecConfig(spec_type=SpeculativeType.DRAFT_MTP, draft_n_max=2))
    assert (llm.speculation, llm._engine.draft_tokens) == ("mtp", 2)
    assert text(llm, 30) == text(off, 30)
    stats = llm.speculation_stats
    assert stats.accepted > 0
    assert stats.drafted <= 2 * stats.rounds


def test_ngram(llama, off):
    llm = llama(speculative=SpecConfig(spec_type=SpeculativeType.NGRAM_MAP_K, ngram_size_m=6))
    assert (llm.speculation, llm._engine.draft_tokens) == ("ngram", 6)
    assert text(llm, 30) == text(off, 30)


def test_dflash():
    folder = ROOT / "models" / "tiny-moe"
    config = SpecConfig(
        SpeculativeType.DRAFT_DFLASH, draft_model_path=str(folder / "dflash-f16.gguf"), draft_n_max=5
    )
    texts = []
    for speculative in (config, SpecConfig()):
        llm = Llama(str(folder / "tiny-moe-f16.gguf"), n_ctx=256, speculative=speculative, verbose=False)
        assert llm.speculation == ("dflash" if speculative is config else "off")
        texts.append(text(llm, 30, llm.tokenize(b"def fibonacci(n):")))
        llm.close()
    assert texts[0] == texts[1]


def test_none(llama):
    llm = llama(speculative=SpecConfig())
    assert (llm.speculation, llm.speculation_reason) == ("off", 'speculation="off"')


def test_trees_beside_it(llama, off):
    llm = llama(speculative=SpecConfig(SpeculativeType.DRAFT_MTP), tree_budget=8)
    assert text(llm, 30) == text(off, 30)
    assert llm.speculation_stats.tree_rounds > 0


def test_pickle(llama):
    llm = llama(speculative=SpecConfig(SpeculativeType.DRAFT_MTP, draft_n_max=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = pickle.loads(pickle.dumps(llm))
    assert (copy.speculation, copy._engine.draft_tokens) == ("mtp", 5)
    copy.close()


def test_refusals(llama, gguf):
    with pytest.raises(OptionError, match="speculation='ngram' beside speculative="):
        llama(speculative=SpecConfig("mtp"), speculation="ngram")
    with pytest.raises(OptionError, match="found draft_model= beside"):
        llama(speculative=SpecConfig("mtp"), draft_model=lambda ids: ids)
    with pytest.raises(UnsupportedError, match="found no MTP block"):
        Llama(gguf("moe-plain"), speculative=SpecConfig("mtp"), verbose=False)


def test_the_names_are_where_programs_look_for_them():
    from draftwood._llama_cpp import llama_speculative

    assert llama_speculative.SpecConfig is draftwood.SpecConfig is SpecConfig
    assert llama_speculative.SpeculativeType is draftwood.SpeculativeType
