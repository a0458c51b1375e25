"""Flash attention where nobody asks: llama.cpp's `auto` on a GPU, off on a CPU. Who asks gets what was asked.

The card is faked: only where the arguments are read one seems to be there, so that layers stay on the CPU.
tests/gpu/test_surroundings.py has a real one.
"""

from __future__ import annotations

import pickle
import re

import draftwood.load.arguments
import draftwood.load.preparation
import pytest
from click.testing import CliRunner
from draftwood import OptionError, StateError
from draftwood._llama_cpp import llama_cpp as native
from draftwood.cli import cli

from tests.model.texts import text

AUTO, OFF, ON = (getattr(native, f"LLAMA_FLASH_ATTN_TYPE_{name}") for name in ("AUTO", "DISABLED", "ENABLED"))
Q8_0 = native.GGML_TYPE_Q8_0
SAID = {AUTO: "auto", OFF: "disabled", ON: "enabled"}


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(draftwood.load.preparation, "cards", lambda: [1])


def asked_for(llm):
    return llm.context_params.flash_attn_type


def said(log):
    """What llama.cpp says of each context: what it was asked for, and whether it decided for it."""
    return re.findall(r"flash_attn += (\w+)", log), log.count("Flash Attention enabled")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, OFF), ({"flash_attn": None}, OFF), ({"flash_attn": False}, OFF), ({"flash_attn": True}, ON)],
    ids=str,
)
def test_on_a_cpu_it_is_off_unless_asked_for(llama, capfd, given, expected):
    llm = llama(speculation="mtp", verbose=True, **given)
    assert asked_for(llm) == expected
    assert said(capfd.readouterr().err) == ([SAID[expected]] * 2, 0)  # the model's context and its drafter's


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, AUTO),
        ({"flash_attn": None}, AUTO),
        ({"flash_attn": False}, OFF),
        ({"flash_attn": True}, ON),
        ({"n_gpu_layers": 0}, OFF),
        ({"n_gpu_layers": 2}, AUTO),
        ({"offload_kqv": False}, OFF),
        ({"type_k": Q8_0}, OFF),
        ({"type_k": Q8_0, "type_v": Q8_0}, AUTO),
    ],
    ids=str,
)
def test_on_a_card_llama_cpp_decides_unless_told(llama, card, capfd, given, expected):
    llm = llama(speculation="mtp", verbose=True, **{"n_gpu_layers": -1, **given})
    asked, decided = said(capfd.readouterr().err)
    assert asked_for(llm) == expected
    if given.get("type_v") == Q8_0:
        assert asked == ["enabled"] * 2, "llama.cpp leaves no choice for such values"
    else:
        assert (asked, decided) == ([SAID[expected]] * 2, 2 if expected == AUTO else 0)
    assert llm.create_completion([5, 6, 7], max_tokens=8)["usage"]["completion_tokens"] >= 8


def test_heads_that_hold_no_whole_blocks_load_as_without_a_card(llama, card):
    """llama.cpp refuses them with flash attention, and llama-cpp-python, which has it off, takes them."""
    assert asked_for(llama("small-heads", type_k=Q8_0, n_gpu_layers=-1)) == OFF  # 4 heads of 16


@pytest.mark.parametrize("settings", [{"offload_kqv": False}, {"flash_attn": False}], ids=str)
def test_quantised_values_are_refused_where_it_stays_off(llama, card, settings):
    with pytest.raises(OptionError, match="type_v=8 without flash_attn=True"):
        llama(type_v=Q8_0, n_gpu_layers=-1, **settings)


@pytest.mark.parametrize("speculation", ["mtp", "tree"])
def test_drafts_are_verified_as_plain_decoding(llama, card, speculation):
    plain, llm = (llama(speculation=each, n_gpu_layers=-1) for each in ("off", speculation))
    assert text(llm, 60) == text(plain, 60)
    assert llm.speculation_stats.accepted > 0


def test_a_pickled_llama_says_as_little_as_its_original(llama, card, monkeypatch):
    llm = llama(n_gpu_layers=-1)
    assert asked_for(llm) == AUTO
    assert llm.__getstate__()["flash_attn"] is None
    assert [llama(flash_attn=each).__getstate__()["flash_attn"] for each in (True, False)] == [True, False]
    kept = pickle.dumps(llm)
    copies = [pickle.loads(kept)]
    monkeypatch.setattr(draftwood.load.preparation, "cards", lambda: [])  # on a machine without a card
    monkeypatch.setattr(draftwood.load.arguments, "_said", {"cards"})
    copies.append(pickle.loads(kept))
    found = [asked_for(copy) for copy in copies]
    for copy in copies:
        copy.close()
    assert found == [AUTO, OFF]


def test_a_state_of_a_cpu_is_refused_in_words(llama, card):
    llm = llama()
    text(llm, 3)
    state = llm.save_state()
    with pytest.raises(StateError, match="left out, it differs between GPU and CPU"):
        llama(n_gpu_layers=-1).load_state(state)


@pytest.mark.parametrize("command", ["run", "tree"])
def test_commands_say_nothing_of_it(gguf, card, capfd, command):
    arguments = ["--raw", "--n-gpu-layers", "-1", "--n-ctx", "256", "--threads", "1", "--verbose"]
    limit = ["-n", "4"] if command == "run" else []
    done = CliRunner().invoke(cli, [command, gguf("planted-moe"), "one two", *arguments, *limit])
    assert done.exit_code == 0, done.output
    asked, decided = said(done.stderr + capfd.readouterr().err)
    assert (set(asked), decided) == ({"auto"}, len(asked))
