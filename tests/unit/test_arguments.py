"""Upstream's arguments that are refused or have no effect: said in words, and only those."""

import warnings

import numpy as np
import pytest
from draftwood.errors import OptionError
from draftwood.load import arguments
from draftwood.load.arguments import (
    CACHE_TYPES,
    CPU_CACHE_TYPES,
    MAX_THREADS,
    auto_flash,
    check,
    check_devices,
    warn_of_unknown,
    warn_without_cards,
)

KNOWN = ("speculation", "draft_tokens", "tree_budget", "n_ctx", "n_gpu_layers")


def test_misspelt_names_are_said_in_one_warning():
    with pytest.warns(UserWarning, match="which Llama does not know") as caught:
        warn_of_unknown(
            {"specualtion": "off", "draft_token": 9, "tree_bugdet": 8, "n_ctx": 64, "zzz": 1}, KNOWN
        )
    assert len(caught) == 1
    text = str(caught[0].message)
    for name, meant in (
        ("specualtion", "speculation"),
        ("draft_token", "draft_tokens"),
        ("tree_bugdet", "tree_budget"),
    ):
        assert f"{name}= (did you mean {meant}=?)" in text
    assert "zzz=, which Llama does not know" in text
    assert "n_ctx" not in text


def test_names_that_wrappers_pass_are_none_of_them():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown({"n_parts": -1, "f16_kv": True, "device": "cpu", "n_ctx": 64}, KNOWN)
        warn_of_unknown({}, KNOWN)


@pytest.mark.parametrize(
    ("backends", "found"),
    [
        (
            [],
            'a build without a GPU\'s backend; every layer stays on the CPU .CMAKE_ARGS="-DGGML_CUDA=on" pip',
        ),
        (
            ["CUDA"],
            "no device that CUDA can use; every layer stays on the CPU .see nvidia-smi and CUDA_VISIBLE",
        ),
        (["CUDA", "Vulkan"], "no device that CUDA or Vulkan can use"),
    ],
    ids=str,
)
def test_layers_without_a_card_are_said_once(monkeypatch, backends, found):
    monkeypatch.setattr(arguments, "_said", set())
    with pytest.warns(UserWarning, match=f"found n_gpu_layers=-1 and {found}"):
        warn_without_cards(-1, backends, ("", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_without_cards(-1, backends, ("", ""))


def test_a_cuda_backend_that_cannot_be_loaded_is_named_with_the_fix(monkeypatch):
    monkeypatch.setattr(arguments, "_said", set())
    found = "cannot be loaded, libcudart.so.13: none; every layer stays on the CPU .pip install it"
    with pytest.warns(UserWarning, match=found):
        warn_without_cards(-1, [], ("libcudart.so.13: none", "pip install it"))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"n_ctx": -1}, "n_ctx is -1; expected a whole number of at least 0"),
        ({"n_ctx": None}, "n_ctx is None"),
        ({"n_ctx": 512.0}, "n_ctx is 512.0"),
        ({"n_batch": 0}, "n_batch is 0; expected a whole number of at least 1"),
        ({"n_batch": -5}, "n_batch is -5"),
        ({"n_batch": True}, "n_batch is True"),
        ({"n_ubatch": -1}, "n_ubatch is -1; expected a whole number of at least 0"),
        ({"n_ctx": 1 << 31}, "n_ctx is 2147483648; expected at most 2147483647"),
        ({"n_ctx": 99999999999}, "n_ctx is 99999999999; expected at most 2147483647"),
        ({"n_batch": 1 << 32}, "n_batch is 4294967296; expected at most 2147483647"),
        ({"n_ubatch": 1 << 32}, "n_ubatch is 4294967296; expected at most 2147483647"),
        ({"n_batch": np.int64(0)}, "n_batch is .*0.*; expected a whole number of at least 1"),
        ({"n_batch": np.float64(8)}, "n_batch is .*8.0.*; expected a whole number"),
        ({"n_ctx": np.bool_(True)}, "n_ctx is .*True.*; expected a whole number"),
        ({"n_threads": 100_000}, f"n_threads is 100000; expected at most {MAX_THREADS}"),
        ({"n_threads_batch": MAX_THREADS + 1}, f"n_threads_batch is .*; expected at most {MAX_THREADS}"),
        ({"n_threads": (1 << 32) + 4}, "n_threads is 4294967300; expected at most"),
        ({"n_threads": -2}, "n_threads is -2; expected a whole number of at least -1"),
        ({"n_threads_batch": 100_000 - (1 << 32)}, "n_threads_batch is -4294867296; expected a whole"),
        ({"n_threads": "4"}, "n_threads is '4'; expected a whole number"),
        ({"n_threads": 4.0}, "n_threads is 4.0"),
        ({"n_threads_batch": True}, "n_threads_batch is True"),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense(arguments, found):
    with pytest.raises(OptionError, match=found) as caught:
        check(arguments, on_cards=True)
    assert f"{next(iter(arguments))}=" in caught.value.hint
    check({}, on_cards=True)
    check({"n_ctx": 0, "n_batch": 1, "n_ubatch": 0}, on_cards=True)
    check(dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), (1 << 31) - 1), on_cards=True)


@pytest.mark.parametrize(
    ("given", "found", "hint"),
    [
        ({"n_gpu_layers": "all"}, "n_gpu_layers is 'all'; expected a whole number", "n_gpu_layers=-1"),
        ({"n_gpu_layers": "5"}, "n_gpu_layers is '5'; expected a whole number", "n_gpu_layers=-1"),
        ({"n_gpu_layers": None}, "n_gpu_layers is None; expected a whole number", "n_gpu_layers=-1"),
        ({"n_gpu_layers": 1.5}, "n_gpu_layers is 1.5; expected a whole number", "n_gpu_layers=-1"),
        ({"n_gpu_layers": 1 << 31}, "n_gpu_layers is 2147483648; expected at most", "n_gpu_layers=-1"),
        ({"tensor_split": "x"}, "tensor_split is 'x'; expected a list of numbers", "tensor_split="),
        ({"tensor_split": "31"}, "tensor_split is '31'; expected a list of numbers", "tensor_split="),
        ({"tensor_split": 1}, "tensor_split is 1; expected a list of numbers", "tensor_split="),
        ({"tensor_split": [1, "x"]}, "tensor_split is .1, 'x'.; expected a list", "tensor_split="),
        ({"tensor_split": [float("nan")]}, "tensor_split is .nan.; expected a list", "tensor_split="),
        ({"tensor_split": {1}}, "tensor_split is .1.; expected a list of numbers", "tensor_split="),
        ({"tensor_split": np.array(1.0)}, r"tensor_split is array\(1", "tensor_split="),
        ({"tensor_split": [10**400]}, "tensor_split is .1000", "tensor_split="),
        ({"tensor_split": {0: 1}}, "tensor_split is .0: 1.; expected a list", "tensor_split="),
        ({"flash_attn": "off"}, "flash_attn is 'off'; expected True, False or None", "leave it out"),
        ({"flash_attn": "x"}, "flash_attn is 'x'", "leave it out"),
        ({"flash_attn": 2}, "flash_attn is 2", "leave it out"),
        ({"flash_attn": []}, r"flash_attn is \[\]", "leave it out"),
    ],
    ids=str,
)
def test_wrong_types_of_what_runs_on_a_card(given, found, hint):
    with pytest.raises(OptionError, match=found) as caught:
        check_devices(given)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"n_gpu_layers": np.int64(7)}, {"n_gpu_layers": 7}),
        ({"n_gpu_layers": False}, {"n_gpu_layers": 0}),
        ({"flash_attn": -1}, {"flash_attn": None}),
        ({"tensor_split": np.array([3, 1], np.float16)}, {"tensor_split": [3.0, 1.0]}),
        ({"n_gpu_layers": -5}, {"n_gpu_layers": -1}),
        ({"tensor_split": (3, np.float32(1))}, {"tensor_split": [3.0, 1.0]}),
        ({"tensor_split": np.array([1, 2])}, {"tensor_split": [1.0, 2.0]}),
        ({"tensor_split": None}, {"tensor_split": None}),
        ({"flash_attn": "auto"}, {"flash_attn": None}),
        ({"flash_attn": None}, {"flash_attn": None}),
        *(({"flash_attn": each}, {"flash_attn": True}) for each in (True, 1, np.bool_(True))),
        *(({"flash_attn": each}, {"flash_attn": False}) for each in (False, 0, np.bool_(False))),
    ],
    ids=str,
)
def test_what_runs_on_a_card_becomes_pythons_own(given, expected):
    check_devices(given)
    assert given == expected
    assert [type(value) for value in given.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize("seed", ["x", 1.5, [1]], ids=str)
def test_seeds_that_are_none(seed):
    with pytest.raises(OptionError, match=r"seed is .*; expected a whole number"):
        check({"seed": seed}, on_cards=False)
    given = {"seed": np.int64(7)}
    check(given, on_cards=False)
    assert type(given["seed"]) is int
    check({"seed": None}, on_cards=False)


@pytest.mark.parametrize("name", ["n_threads", "n_threads_batch"])
def test_numbers_of_threads_that_mean_a_default_stay(name):
    for value in (None, 0, -1, 1, MAX_THREADS):
        given = {name: value}
        check(given, on_cards=True)
        assert given == {name: value}


def test_whole_numbers_of_any_type_become_ints():
    given = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 0, "n_threads": 2, "n_threads_batch": 1}
    given |= {"type_k": 8, "type_v": 1}
    for kind in (np.int64, np.uint8, np.array):
        found = {name: kind(value) for name, value in given.items() if kind is not np.uint8 or value < 256}
        expected = {name: given[name] for name in found}
        check(found, on_cards=False)
        assert found == expected
        assert {type(value) for value in found.values()} == {int}


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize(
    "value",
    [99, -1, 9, 16, 24, 26, 31, 36, 43, 1 << 40, "q8_0", True, 8.0, [8], np.int64(99), np.bool_(True)],
    ids=str,
)
def test_cache_types_that_are_none(name, value):
    with pytest.raises(
        OptionError, match=f"{name} is .*; expected one of 0 .f32., 1 .f16., .* 8 .q8_0."
    ) as caught:
        check({name: value, "flash_attn": True}, on_cards=False)
    assert f"{name}=8" in caught.value.hint


def test_cache_types_that_are():
    check({}, on_cards=True)
    check({"type_k": None, "type_v": None}, on_cards=True)
    for value in CACHE_TYPES.values():
        check({"type_k": value}, on_cards=True)
        check({"type_k": value, "type_v": value, "flash_attn": True}, on_cards=True)
    for value in CPU_CACHE_TYPES:
        check({"type_k": value, "type_v": value, "flash_attn": True}, on_cards=False)
        with pytest.raises(OptionError, match=f"type_k is {value}"):
            check({"type_k": value}, on_cards=True)
    for value in (0, 1, 30):
        check({"type_v": value}, on_cards=False)
    with pytest.raises(OptionError, match="type_v=8 without flash_attn=True") as caught:
        check({"type_v": 8}, on_cards=False)
    assert "flash_attn=True" in caught.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"flash_attn": None}, True),
        ({"flash_attn": False}, False),
        ({"flash_attn": True}, False),
        ({"offload_kqv": False}, False),
        ({"offload_kqv": True, "type_k": 1, "type_v": 1}, True),
        ({"type_k": 0, "type_v": 30}, True),
        ({"type_k": None, "type_v": None}, True),
        ({"type_k": 8}, False),
        ({"type_k": np.int64(8), "type_v": np.int64(1)}, False),
        ({"type_k": 8, "type_v": 8}, True),
        ({"type_v": 8}, True),
        ({"type_k": "q8_0"}, True),  # refused later
    ],
    ids=str,
)
def test_llama_cpp_decides_about_flash_attention_on_cards_where_nobody_says(given, expected):
    assert auto_flash(given, on_cards=True) is expected
    assert auto_flash(given, on_cards=False) is False


def test_quantised_values_where_llama_cpp_decides():
    """It turns flash attention on for them."""
    for value in (8, np.int64(2)):
        check({"type_v": value}, on_cards=True, auto_flash=True)
        with pytest.raises(OptionError, match="without flash_attn=True"):
            check({"type_v": value, "flash_attn": False}, on_cards=True)


def test_embeddings_without_weights():
    for settings in ({"vocab_only": True}, {"embedding": True}, {"vocab_only": True, "embedding": False}):
        check(settings, on_cards=False)
    with pytest.raises(OptionError, match="vocab_only=True beside embedding=True") as caught:
        check({"vocab_only": True, "embedding": True}, on_cards=False)
    assert "leave vocab_only out" in caught.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "10000", None], ids=str)
@pytest.mark.parametrize("name", ["rope_freq_base", "rope_freq_scale", "yarn_ext_factor"])
def test_frequencies_that_are_no_numbers(name, value):
    with pytest.raises(OptionError, match=f"{name} is .*; expected a finite number"):
        check({name: value}, on_cards=False)


def test_frequencies():
    check(
        {"rope_freq_base": 10000, "rope_freq_scale": np.float32(0.5), "yarn_ext_factor": -1.0}, on_cards=False
    )
