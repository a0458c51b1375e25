"""A model spread over two cards: by layers with drafts, by tensors without, by rows not at all."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draftwood.load.devices import cards

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
sys.path.append(str(ROOT / "tools"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(cards()) < 2, reason="needs two cards"),
]

# prompts that share a beginning go back to a checkpoint; a saved state is read again
TEXTS = """
import json, sys
from draftwood import Llama, UnsupportedError
path, settings = sys.argv[1], json.loads(sys.argv[2])
try:
    llm = Llama(path, n_gpu_layers=-1, n_ctx=512, flash_attn=True, verbose=False, **settings)
except UnsupportedError as error:
    print(json.dumps({"refused": error.message}))
    raise SystemExit
start = list(range(5, 60))
def text(prompt):
    return llm.create_completion(prompt, max_tokens=32, temperature=0.0)["choices"][0]["text"]
texts = [text(start + [70]), text(start + [80, 81]), text(start + [70])]
state = llm.save_state()
llm.load_state(state)
texts.append(text(start + [90]))
stats = llm.speculation_stats
found = {"drafted": stats.drafted, "accepted": stats.accepted, "trees": stats.tree_rounds}
print(json.dumps({"texts": texts, "by": llm.speculation, **found}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a model whose heads can be split in two."""
    synth = importlib.import_module("synth_gguf")
    spec = dataclasses.replace(synth.PRESETS["35b-a3b"], layers=4, experts=32, vocab=8192)
    path = tmp_path_factory.mktemp("cards") / "two-cards.gguf"
    synth.write(spec, path)
    return path


def run(model: Path, **settings: object) -> dict:
    command = [sys.executable, "-c", TEXTS, str(model), json.dumps(settings)]
    surroundings = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("speculation", ["mtp", "tree"])
def test_layers_over_cards_give_the_text_of_one(model, speculation):
    one = run(model, split_mode=0, speculation="off")
    two = run(model, split_mode=1, speculation=speculation)
    assert two["texts"] == one["texts"]
    assert two["texts"][0] == two["texts"][2]
    assert two["drafted"] > 0
    assert (two["trees"] > 0) is (speculation == "tree")


@pytest.mark.parametrize("speculation", ["mtp", "dflash", "tree"])
def test_accepted_drafts_over_cards_are_kept_as_on_one(speculation):
    """A trained model: its rows are committed on both cards."""
    drafter = {"drafter": str(TINY.with_name("dflash-f16.gguf"))} if speculation == "dflash" else {}
    one = run(TINY, split_mode=0, speculation="off")
    two = run(TINY, split_mode=1, speculation=speculation, **drafter)
    assert two["texts"] == one["texts"]
    assert two["accepted"] > 0


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_tensors_over_cards_decode_plainly(model, speculation):
    found = run(model, split_mode=3, speculation=speculation)
    assert found["texts"][0] == found["texts"][2]
    assert found["drafted"] == 0
    assert found["by"] == "off"


@pytest.mark.parametrize("speculation", ["mtp", "tree", "ngram"])
def test_drafts_over_split_tensors_are_refused_in_words(model, speculation):
    assert "llama.cpp keeps one graph" in run(model, split_mode=3, speculation=speculation)["refused"]


def test_rows_over_cards_are_refused_in_words(model):
    assert "splits no tensor by rows" in run(model, split_mode=2)["refused"]
