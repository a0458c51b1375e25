"""kv_overrides= with values that no header may have are refused in words; others act as in llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest
from draftwood import Llama, OptionError

P = [(7 * i) % 251 for i in range(20)]
SMALL = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
NAN = float("nan")


def of(gguf: Any, kv: Any) -> Llama:
    return Llama(gguf("planted-moe"), kv_overrides=kv, **SMALL)


def text(llm: Llama) -> list[int]:
    tokens = llm.generate(P, temp=0.0)
    return [next(tokens) for _ in range(12)]


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("expert_used_count", 99, "is 99; expected 1 to 8 (expert_count)"),
        ("expert_used_count", 0, "is 0; expected 1 to 8 (expert_count)"),
        ("expert_count", 0, "is 0; expected 1 to 1024"),
        ("expert_group_count", 5, "is 5; expected a divisor of expert_count, which is 8"),
        ("block_count", 1 << 20, "is 1048576; expected 1 to 512"),
        ("block_count", -1, "is 4294967295; expected 1 to 512"),
        ("nextn_predict_layers", 100, "is 100; expected 0 to "),
        ("attention.layer_norm_rms_epsilon", -1.0, "is -1; expected 0 to 1"),
        ("attention.layer_norm_rms_epsilon", NAN, "is nan; expected 0 to 1"),
        ("attention.key_length", 3, "is 3; expected a multiple of 2"),
        ("rope.freq_base", 0.0, "is 0; expected 1e-06 to 1e+30"),
        ("rope.scaling.type", "round", "is 'round'; expected none, linear, yarn or longrope"),
        ("ssm.conv_kernel", 1, "is 1; expected 2 to 1024"),
    ],
)
def test_a_value_that_no_header_may_have(gguf, field, value, found):
    with pytest.raises(OptionError) as caught:
        of(gguf, kv={"tokenizer.ggml.add_bos_token": False, f"qwen35moe.{field}": value})
    assert caught.value.message.startswith(f"kv_overrides: qwen35moe.{field} {found}")
    assert caught.value.hint == "correct the override, or leave it out"


@pytest.mark.parametrize(
    ("kv", "found"),
    [
        (["a=1"], "kv_overrides is of type list; expected a dict"),
        ({"a": None}, "kv_overrides has 'a': None; expected a name and a bool, int, float or text"),
        ({1: 1}, "kv_overrides has 1: 1; expected a name"),
        ({"a": "é" * 64}, "kv_overrides has a text of 128 bytes, 'é.*; expected at most 127"),
        ({"a" * 128: 1}, "kv_overrides has a text of 128 bytes, 'a"),
        ({"\0": 1}, r"kv_overrides has the text '\\x00'; expected characters that UTF-8 has, and no NUL"),
        ({"general.alignment\0": 3}, "kv_overrides has the text 'general"),
        ({"a": "\ud800"}, "kv_overrides has the text"),
    ],
)
def test_what_is_no_override(gguf, kv, found):
    with pytest.raises(OptionError, match=found):
        of(gguf, kv=kv)


@pytest.mark.parametrize(
    "kv",
    [
        {},
        {"": 1},
        {"general.alignment": 3},
        {"qwen35moe.expert_count": 0.0},
        {"qwen35moe.attention.layer_norm_rms_epsilon": -1},
        {"qwen35moe.rope.dimension_sections": 7},
        {"qwen35moe.unheard": 5, "unheard": "x", "so": True},
        {"qwen35moe.block_count": True},
    ],
    ids=repr,
)
def test_an_override_of_another_type_has_no_effect(gguf, kv):
    llm, plain = of(gguf, kv=kv), of(gguf, kv=None)
    assert text(llm) == text(plain)
    llm.close()
    plain.close()


def test_a_sound_override_acts(gguf):
    few, plain = of(gguf, kv={"qwen35moe.expert_used_count": 1}), of(gguf, kv=None)
    assert text(few) != text(plain)
    few.close()
    plain.close()


def test_a_path_with_a_space_and_an_umlaut(gguf, tmp_path):
    path = tmp_path / "ä b.gguf"
    path.symlink_to(gguf("planted-moe"))
    with pytest.raises(OptionError, match="block_count is 0; expected 1 to 512"):
        Llama(str(path), kv_overrides={"qwen35moe.block_count": 0}, **SMALL)
