"""`speculative=SpecConfig(...)`: what each field becomes, and each refusal in words."""

import enum
import warnings
from dataclasses import asdict, astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
from draftwood.errors import OptionError, UnsupportedError
from draftwood.options import Options
from draftwood.speculative import Drafting, SpecConfig, SpeculativeType, drafting_of


class Theirs(enum.IntEnum):
    """As the fork has it: numbers whose names are llama.cpp's."""

    NONE = 0
    DRAFT_MTP = 3
    NGRAM_MAP_K = 7


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SpecConfig(), ("off", None, None, 0.0)),
        (SpecConfig(draft_n_max=99, draft_n_min=4), ("off", None, None, 0.0)),
        (SpecConfig(SpeculativeType.DRAFT_MTP), ("mtp", None, 3, 0.0)),
        (SpecConfig(SpeculativeType.DRAFT_MTP, draft_n_max=2, draft_p_min=0.25), ("mtp", None, 2, 0.25)),
        (
            SpecConfig(SpeculativeType.DRAFT_DFLASH, draft_model_path="d.gguf", draft_n_max=7),
            ("dflash", "d.gguf", 7, 0.0),
        ),
        (SpecConfig(SpeculativeType.NGRAM_MAP_K, ngram_size_m=4), ("ngram", None, 4, 0.0)),
        (SpecConfig(SpeculativeType.NGRAM_MAP_K4V, draft_n_max=2, draft_p_min=0.5), ("ngram", None, 48, 0.0)),
        (SpecConfig(SpeculativeType.NGRAM_SIMPLE), ("ngram", None, 48, 0.0)),
        (SpecConfig("draft-mtp"), ("mtp", None, 3, 0.0)),
        (SpecConfig("mtp"), ("mtp", None, 3, 0.0)),
        (SpecConfig("ngram_k"), ("ngram", None, 48, 0.0)),
        (SimpleNamespace(spec_type=Theirs.NONE), ("off", None, None, 0.0)),
        (SimpleNamespace(spec_type=Theirs.DRAFT_MTP, draft_n_max=5), ("mtp", None, 5, 0.0)),
        (SimpleNamespace(spec_type=Theirs.NGRAM_MAP_K), ("ngram", None, 48, 0.0)),
    ],
    ids=str,
)
def test_what_it_becomes(config, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        became = drafting_of(config, Drafting())
    assert astuple(became) == expected
    Options(**{name: value for name, value in asdict(became).items() if value is not None})


@pytest.mark.parametrize(
    ("config", "error", "found"),
    [
        ("mtp", OptionError, "speculative is 'mtp'; expected an object with a spec_type"),
        (True, OptionError, "speculative is True"),
        (SpecConfig(None), OptionError, "expected an object with a spec_type"),
        (SpecConfig(3), UnsupportedError, "found spec_type '3'; expected one of none, draft-mtp"),
        (SpecConfig(SpeculativeType.DRAFT_DFLASH), OptionError, "without draft_model_path"),
        (
            SpecConfig(SpeculativeType.DRAFT_MTP, draft_model_path="mtp.gguf"),
            UnsupportedError,
            "found draft_model_path='mtp.gguf'",
        ),
        (
            SpecConfig(SpeculativeType.NGRAM_MAP_K, draft_model_path="x.gguf"),
            UnsupportedError,
            "which takes none",
        ),
        (SpecConfig("mtp", draft_n_max=0), OptionError, "draft_n_max is 0; expected 1 to 63 tokens"),
        (SpecConfig("mtp", draft_n_max=64), OptionError, "draft_n_max is 64"),
        (SpecConfig("mtp", draft_n_max="3"), OptionError, "draft_n_max is '3'"),
        (SpecConfig("mtp", draft_n_max=True), OptionError, "draft_n_max is True"),
        (SpecConfig("ngram-map-k", ngram_size_m=100), OptionError, "ngram_size_m is 100"),
    ],
    ids=str,
)
def test_what_is_refused(config, error, found):
    with pytest.raises(error, match=found) as refused:
        drafting_of(config, Drafting())
    assert refused.value.hint


def test_a_length_of_numpys_type():
    became = drafting_of(SpecConfig("mtp", draft_n_max=np.int64(4)), Drafting())
    assert (became.draft_tokens, type(became.draft_tokens)) == (4, int)


def refused_types():
    return list(SpeculativeType)[list(SpeculativeType).index(SpeculativeType.DRAFT_SIMPLE) :]


@pytest.mark.parametrize("kind", SpeculativeType)
def test_every_type_is_mapped_or_refused(kind):
    config = SpecConfig(kind, draft_model_path="d.gguf" if kind is SpeculativeType.DRAFT_DFLASH else None)
    if kind in refused_types():
        with pytest.raises(UnsupportedError, match=f"found spec_type '{kind.value}'"):
            drafting_of(config, Drafting())
    else:
        assert drafting_of(config, Drafting()).speculation in ("off", "mtp", "dflash", "ngram")


@pytest.mark.parametrize(
    ("beside", "found"),
    [
        ({"speculation": "ngram"}, "found speculation='ngram' beside speculative="),
        ({"speculation": "off", "draft_tokens": 3}, "found speculation='off', draft_tokens=3"),
        ({"drafter": "d.gguf"}, "found drafter='d.gguf'"),
        ({"draft_p_min": 0.5}, "found draft_p_min=0.5"),
    ],
)
def test_two_places_that_say_what_drafts(beside, found):
    with pytest.raises(OptionError, match=found):
        drafting_of(SpecConfig("mtp"), Drafting(**beside))


def test_fields_without_effect_are_named_once():
    config = SpecConfig("mtp", draft_n_gpu_layers="all", draft_devices=["CUDA0"], draft_n_min=0)
    with pytest.warns(UserWarning, match="draft_n_gpu_layers, draft_devices") as given:
        drafting_of(config, Drafting())
    assert len(given) == 1
    assert "draft_n_min" not in str(given[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafting_of(replace(config, spec_type="none"), Drafting())  # nothing runs that they could change
