"""Fields of a DFlash drafter's header that would end the process or hang, or would fail every draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftwood import DraftwoodError, Llama

from tests.model.test_damaged_header import rewritten
from tests.model.test_dflash import DRAFTER, TARGET

HEADS = ("dflash.attention.key_length", "dflash.attention.value_length")
SECTIONS, ROTATED = "dflash.rope.dimension_sections", "dflash.rope.dimension_count"
PATTERN = "dflash.attention.sliding_window_pattern"
WINDOW = {"dflash.attention.sliding_window": 64, PATTERN: [1, 1, 1]}


def loaded(tmp_path: Path, fields: dict[str, object], drop: tuple[str, ...] = ()) -> Llama:
    path = rewritten(DRAFTER, tmp_path / "drafter.gguf", fields, drop)
    settings = {"n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "draft_tokens": 4, "verbose": False}
    return Llama(str(TARGET), drafter=str(path), speculation="dflash", **settings)


@pytest.mark.parametrize(
    ("fields", "drop", "found"),
    [
        ({SECTIONS: [0, 0, 0, 32]}, (), f"{SECTIONS} is [0, 0, 0, 32]; expected none below 0"),
        ({SECTIONS: 8}, (), f"{SECTIONS} is no array of 4 whole numbers; expected one"),
        (
            {"dflash.attention.head_count_kv": [2, 0, 2]},
            (),
            "is 0 for layer 1; expected one number for all layers",
        ),
        (
            {"dflash.attention.head_count_kv": [2, 4, 1]},
            (),
            "is 2 for layer 0; expected one number for all layers",
        ),
        ({ROTATED: 66}, HEADS, "is 66; expected 2 to 64 (embedding_length / attention.head_count)"),
        ({ROTATED: 128}, HEADS, "is 128; expected 2 to 64 (embedding_length / attention.head_count)"),
        ({ROTATED: 63}, HEADS, "is 63; expected a multiple of 2"),
        ({ROTATED: 128}, (), f"{ROTATED} is 128; expected 2 to 64 (attention.key_length)"),
        ({ROTATED: 63}, (), f"{ROTATED} is 63; expected a multiple of 2"),
        ({ROTATED: 0}, (), f"{ROTATED} is 0; expected 2 to 64 (attention.key_length)"),
        ({ROTATED: 0}, HEADS, f"{ROTATED} is 0; expected 2 to 64"),
        ({"dflash.rope.dimension_count_swa": 128, **WINDOW}, (), "_swa is 128; expected 2 to 64"),
        (
            {**WINDOW, PATTERN: [0, 0, 0]},
            (),
            f"{PATTERN} is true for no layer; expected an array that is true for one of them",
        ),
        ({**WINDOW, PATTERN: [False] * 3}, (), f"{PATTERN} is true for no layer"),
        ({**WINDOW, PATTERN: [0, 0, 0, 1]}, (), f"{PATTERN} is true for no layer"),
        ({"dflash.attention.value_length": 32}, (), "value_length is 32; expected 64, attention.key_length"),
        (
            {"dflash.attention.value_length": 32},
            HEADS[:1],
            "value_length is 32; expected 64, embedding_length /",
        ),
        ({"tokenizer.ggml.model": "none"}, (), "tokenizer.ggml.model is 'none'; expected a tokenizer"),
        ({"tokenizer.ggml.mask_token_id": 4096}, (), "mask_token_id is 4096; expected 0 to 4095, a token"),
    ],
    ids=str,
)
def test_a_field_that_is_refused(tmp_path, fields, drop, found):
    with pytest.raises(DraftwoodError) as caught:
        loaded(tmp_path, fields, drop)
    assert found in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("fields", "drop"),
    [
        ({SECTIONS: [0, 0, 0, 0]}, ()),
        ({"dflash.attention.head_count_kv": [2, 2, 2]}, ()),
        ({}, HEADS),
        ({}, (*HEADS, ROTATED)),
        ({}, HEADS[:1]),
        ({"dflash.rope.dimension_count_swa": 64, **WINDOW}, ()),
        ({**WINDOW, PATTERN: [False, False, True]}, ()),
        ({PATTERN: [0, 0, 0]}, ()),
    ],
    ids=str,
)
def test_a_field_that_fits(tmp_path, fields, drop):
    llm = loaded(tmp_path, fields, drop)
    llm.create_completion("one two three", max_tokens=8, temperature=0.0)
    assert llm.speculation_stats.drafted > 0
    assert llm.speculation_stats.failed_drafts == 0
    llm.close()
