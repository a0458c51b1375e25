"""Arguments without effect: said in words, and only those."""

import warnings

import pytest
from draftwood import arguments
from draftwood.arguments import warn_of_unknown, warn_without_cards

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
        warn_without_cards(-1, backends)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_without_cards(-1, backends)
