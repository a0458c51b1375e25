"""Synthetic models with routing=text, run by the finished product: what they write routes as real text."""

import json

import pytest
import routing
from synth_gguf import PRESETS, DrafterSpec, write

pytestmark = pytest.mark.model

PUBLISHED = {"4": 22.1, "8": 35.9, "16": 56.3}  # Qwen3.6-35B-A3B on code, distinct experts of 256 per layer
TOKENS = 1200


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter") / "dflash.gguf"
    write(DrafterSpec(PRESETS["text-moe"], layers=4, heads=4, kv_heads=2, head_size=64, ff=256), path)
    return str(path)


def measured(capsys, *arguments):
    """Run the tool; return its JSON line."""
    assert routing.main([str(each) for each in (*arguments, "--tokens", TOKENS)]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_text_routes_as_real_text(temp, gguf, capsys):
    found = measured(capsys, gguf("text-moe"), "--temp", temp)
    for window, published in PUBLISHED.items():
        assert found["distinct"][window] == pytest.approx(published, rel=0.1), window
    assert found["lru"]["0.08"] == pytest.approx(0.49, abs=0.05)  # published for 21 experts
    assert 0.6 < found["static_half"] < 0.97
    assert 0.85 < found["lru"]["0.50"] < 0.97
    assert found["text"]["repeats"] < 0.01
    assert found["text"]["kinds"] > TOKENS // 2


def test_loose_routing_has_fewer_hits(gguf, capsys):
    found = measured(capsys, gguf("text-moe", routing="loose"), "--temp", 0.8)
    assert found["lru"]["0.50"] == pytest.approx(0.70, abs=0.03)
    assert found["text"]["kinds"] > TOKENS // 2


def test_an_evenly_routed_model_does_not(gguf, capsys):
    found = measured(capsys, gguf("text-moe", routing="even"))
    assert found["distinct"]["4"] > 29  # by chance 30.5, 57.4, 102
    assert found["distinct"]["16"] > 90
    assert found["lru"]["0.50"] < 0.65


@pytest.mark.parametrize("kept", [3, 7])
def test_text_of_kept_mtp_drafts_does_too(kept, gguf, capsys):
    found = measured(capsys, gguf("text-moe"), "--draft", kept)
    for window, published in PUBLISHED.items():
        assert found["distinct"][window] == pytest.approx(published, rel=0.1), window
    assert found["text"]["kinds"] > TOKENS // 2


def test_text_of_kept_dflash_drafts_does_too(gguf, drafter, capsys):
    found = measured(capsys, gguf("text-moe"), "--draft", 7, "--drafter", drafter)
    for window, published in PUBLISHED.items():
        assert found["distinct"][window] == pytest.approx(published, rel=0.1), window
    assert found["text"]["repeats"] < 0.01


def test_the_drafter_drafts_beside_its_target(llama, drafter):
    prompt = b"Hello world, the quick brown fox"
    texts = []
    for settings in ({"speculation": "off"}, {"speculation": "dflash", "drafter": drafter}):
        llm = llama("text-moe", **settings)
        tokens = llm.generate(llm.tokenize(prompt), temp=0.0)
        texts.append([next(tokens) for _ in range(48)])
    assert texts[0] == texts[1]
    assert llm.speculation == "dflash"
    assert llm.speculation_stats.drafted > 40
    assert max(texts[0]) < PRESETS["text-moe"].vocab - 3  # no special token


def test_planted_drafts_are_still_accepted(llama_of):
    whole = PRESETS["text-moe"].vocab  # text of random weights uses all tokens alike
    llm = llama_of("text-moe", {"planted": 0.5}, speculation="mtp", draft_tokens=3, draft_vocab=whole)
    tokens = llm.generate(llm.tokenize(b"Hello world, the quick brown fox"), temp=0.0)
    for _ in range(128):
        next(tokens)
    stats = llm.speculation_stats
    for depth in range(3):
        assert 0 < stats.accepted_by_depth[depth] < stats.drafted_by_depth[depth]
    assert stats.accepted_by_depth[0] > 0.4 * stats.drafted_by_depth[0]
