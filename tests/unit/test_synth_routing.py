"""Routing as on real text, without any library: what is planted, and how it routes in a simulation."""

from dataclasses import replace

import numpy as np
import pytest
import routing as measuring
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize
from synth import blocks, planting, routing
from synth.vocab import builtin
from synth_gguf import PRESETS, SynthError, SynthSpec, write

PUBLISHED = {4: 22.1, 8: 35.9, 16: 56.3}  # Qwen3.6-35B-A3B on code, distinct experts of 256 per layer
SPEC = PRESETS["text-moe"]
N = SPEC.vocab - 3  # text tokens


def read(folder, spec):
    """Write `spec`; return its tensors by name, decoded."""
    path = folder / "model.gguf"
    write(spec, path)
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    return read(tmp_path_factory.mktemp("text"), SPEC)


# ---- planting into encoded rows ----


@pytest.mark.parametrize("kind", planting.PLANTABLE, ids=lambda kind: kind.name)
def test_values_are_planted_and_the_rest_keeps_its_spread(kind):
    top, rest = 0.25, 0.066
    rows = blocks.draw(kind, (4096, 512), 1, "any", mean=0.0, std=rest)
    before = dequantize(rows, kind)
    values = np.random.default_rng(0).uniform(-top, top, (4096, 32)).astype(np.float32)
    values[:, 7] = 0.0
    planting.plant(kind, rows, values, top, rest)
    after = dequantize(rows, kind)
    step = {Type.Q4_K: top / 7, Type.Q6_K: top / 31, Type.Q8_0: top / 127}.get(kind, top / 256)
    assert np.abs(after[:, :32] - values).max() < 0.56 * step  # scales are half-floats
    assert not after[:, 7].any()
    assert after[:, 32:256].std() == pytest.approx(rest, rel=0.03)
    assert np.array_equal(after[:, 256:], before[:, 256:])
    near = np.corrcoef(after[:, 32:256].ravel(), before[:, 32:256].ravel())[0, 1]
    assert near > 0.99  # other scales, the same numbers


@pytest.mark.parametrize("kind", planting.PLANTABLE, ids=lambda kind: kind.name)
def test_a_row_of_planted_values_alone_is_zero_elsewhere(kind):
    rows = blocks.draw(kind, (32, 512), 1, "any", mean=0.0, std=1.0)
    rows[:] = 0
    planting.plant(kind, rows, np.eye(32, dtype=np.float32) * 0.013, 0.013, 0.0)
    wanted = np.zeros((32, 512), np.float32)
    wanted[:, :32] = np.eye(32) * 0.013
    assert np.allclose(dequantize(rows, kind), wanted, atol=0.013 * 0.01)
    assert not dequantize(rows, kind)[:, 32:].any()


# ---- what is where ----


def test_no_block_writes_the_marks(tensors):
    written = [n for n in tensors if n.endswith(routing.OUTPUTS)]
    assert len(written) == 5 * 3  # five blocks: attention or delta net, routed and shared experts
    for name in written:
        rows = tensors[name]
        assert not rows[..., :32, :].any(), name
        assert rows[..., 32:, :].std() > 0.01, name


def test_marks_are_in_every_embedding_and_topics_in_every_head_row(tensors):
    marks = routing.token_marks(builtin(SPEC.vocab).is_text, SPEC.seed)
    assert np.abs(marks).max() == 1.0
    loudest = routing.LOUD * 3.0 / SPEC.width**0.5
    table, head = tensors["token_embd.weight"], tensors["output.weight"]
    assert np.abs(table[:, :32] / loudest - marks).max() < 0.51 / 7  # Q4_K's step
    assert np.abs(head[:N, 2:6] / routing.HEAD - marks[:N, 2:6]).max() < 0.51 / 31  # Q6_K's
    assert not head[:, [0, 1, *range(6, 32)]].any()
    assert not table[N:, 1:6].any()  # specials: no text, no topic
    assert not head[N:, :32].any()
    assert np.hypot(marks[:N, 2], marks[:N, 3]) == pytest.approx(1.0, abs=1e-5)
    for rows in (table, head):  # specials stay quiet
        assert rows[N:, 32:].std() < 0.2 * rows[:N, 32:].std()


def test_the_mtp_block_passes_the_marks_of_its_token_and_no_others(tensors):
    joint = tensors["blk.4.nextn.eh_proj.weight"][:32]
    assert not joint[:, 32:].any()
    each = joint[0, 0]
    assert 0 < each < 1
    assert np.allclose(joint[:, :32], np.eye(32) * each, rtol=1e-3, atol=1e-6)
    assert not tensors["blk.4.nextn.hnorm.weight"][:32].any()
    last = tensors["output_norm.weight"]
    assert np.array_equal(tensors["blk.4.nextn.shared_head_norm.weight"][:32], last[:32])
    assert (last[2:6] > 0).all()
    assert not last[[0, 1, *range(6, 32)]].any()


def test_shares_of_a_router_add_up(tensors):
    for shares in routing.SHARES.values():
        assert shares.popular + shares.token + shares.context + sum(shares.topics) == pytest.approx(1.0)
    marks = tensors["token_embd.weight"][:N, :32]
    for block in range(4):
        router = tensors[f"blk.{block}.ffn_gate_inp.weight"]
        scores = marks @ router[:, :32].T / np.sqrt(2 * block + 1)  # as loud as the stream is there
        context = router[:, 32:].std() * np.sqrt(SPEC.width - 32)
        assert np.hypot(scores.std(), context) == pytest.approx(routing.SCORE, rel=0.1), block
        assert context == pytest.approx(routing.SCORE * routing.SHARES["text"].context ** 0.5, rel=0.1)


# ---- how it routes ----


def written_and_routed(tensors, n_tokens, seed):
    """Return tokens and choices [4, n_tokens, 8]: what marks alone come to, normal noise for the rest."""
    rng = np.random.default_rng(seed)
    marks, head = tensors["token_embd.weight"][:N, :32], tensors["output.weight"][:N, :32]
    head = head * tensors["output_norm.weight"][:32] / np.sqrt(2 * SPEC.layers)
    tokens = [int(rng.integers(N))]
    while len(tokens) < n_tokens:
        logits = head @ marks[tokens[-1]] + 3.0 * rng.standard_normal(N)
        tokens.append(int(logits.argmax()))
    choices = []
    for block in range(4):
        router = tensors[f"blk.{block}.ffn_gate_inp.weight"]
        scores = marks[tokens] @ router[:, :32].T / np.sqrt(2 * block + 1)
        scores += rng.standard_normal((n_tokens, SPEC.width - 32)) @ router[:, 32:].T
        choices.append(np.argsort(-scores, axis=1)[:, :8])
    return tokens, np.stack(choices)


def test_simulated_text_needs_as_many_experts_as_real_text(tensors):
    tokens, choices = written_and_routed(tensors, 1600, 0)
    for window, published in PUBLISHED.items():
        assert measuring.distinct(choices, window) == pytest.approx(published, rel=0.1), window
    assert measuring.lru_hits(choices, 21) == pytest.approx(0.49, abs=0.05)  # published for a cache of 21
    assert 0.6 < measuring.static_hits(choices, 128, 256) < measuring.lru_hits(choices, 128) + 0.05 < 1.0
    assert len(set(tokens)) > 1000  # no loop


def test_evenly_routed_text_needs_more(tmp_path):
    _, choices = written_and_routed(read(tmp_path, replace(SPEC, routing="even")), 400, 0)
    assert measuring.distinct(choices, 4) > 29
    assert measuring.distinct(choices, 16) > 90


def test_a_planted_model_follows_its_topics(tmp_path):
    spec = replace(SPEC, planted=0.5, types="F16")
    tensors = read(tmp_path, spec)
    marks, head = tensors["token_embd.weight"][:N], tensors["output.weight"][:N]
    next_ = np.argsort(-(marks[:512, 32:] @ head[:, 32:].T), axis=1)[:, :2]
    for circle in routing.CIRCLES:
        angle = np.arctan2(marks[:, circle.first + 1], marks[:, circle.first])
        turned = angle[next_] - angle[:512, None]
        turned = np.abs((turned + np.pi) % (2 * np.pi) - np.pi)
        assert np.median(turned) < 1.2 * circle.step


def test_text_is_the_same_bytes_again(tmp_path):
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write(replace(SPEC, seed=seed), path)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


def test_35b_a3b_keeps_its_types_and_size_with_marks(tmp_path):
    spec = replace(PRESETS["35b-a3b"], layers=4, experts=16, vocab=1000)
    kinds = []
    for choice in ("text", "even"):
        write(replace(spec, routing=choice), tmp_path / f"{choice}.gguf")
        kinds.append({t.name: t.tensor_type for t in GGUFReader(tmp_path / f"{choice}.gguf").tensors})
    assert PRESETS["35b-a3b"].routing == "text"
    assert kinds[0] == kinds[1]
    assert kinds[0]["token_embd.weight"] == Type.Q4_K
    assert kinds[0]["output.weight"] == Type.Q6_K


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"routing": "real"}, "routing is 'real', expected even or text or loose."),
        ({"arch": "qwen35"}, "routing is text for a dense model, expected a mixture of experts."),
        ({"tied": True}, "routing is text for a tied model, expected a head of its own."),
        ({"width": 96}, "routing is text and width is 96, expected at least 128"),
    ],
    ids=["name", "dense", "tied", "narrow"],
)
def test_what_cannot_be_routed_is_refused(change, said, tmp_path):
    with pytest.raises(SynthError) as refusal:
        write(replace(SynthSpec(routing="text"), **change), tmp_path / "model.gguf")
    assert said in str(refusal.value)
    assert not list(tmp_path.iterdir())


# ---- the figures ----


def test_figures_of_a_known_sequence():
    turns = np.arange(64)[None, :, None] * 2 % 8 + np.arange(2)  # 0 1, 2 3, 4 5, 6 7, 0 1, ...
    assert measuring.distinct(turns, 1) == 2
    assert measuring.distinct(turns, 3) == 6
    assert measuring.distinct(turns, 16) == 8
    assert measuring.repeated(turns) == 0.0
    assert measuring.static_hits(turns, 4, 8) == 0.5
    assert measuring.lru_hits(turns, 6) == 0.0  # evicted just before they come again
    assert measuring.lru_hits(turns, 8) == 1.0
    still = np.tile([1, 2], (3, 64, 1))
    assert measuring.distinct(still, 16) == 2
    assert (
        measuring.repeated(still) == measuring.static_hits(still, 4, 8) == measuring.lru_hits(still, 2) == 1.0
    )
    both = measuring.figures(np.concatenate([turns, turns]), 8, per_round=3)
    assert both["distinct"] == {"3": 6.0, "4": 8.0, "8": 8.0, "16": 8.0}
    assert both["used"] == 1.0


def test_even_choices_come_to_what_chance_gives():
    rng = np.random.default_rng(0)
    choices = rng.random((4, 800, 256)).argpartition(8, axis=2)[:, :, :8]
    for window in (4, 8, 16):
        assert measuring.distinct(choices, window) == pytest.approx(
            256 * (1 - (248 / 256) ** window), rel=0.02
        )
    assert measuring.static_hits(choices, 128, 256) == pytest.approx(0.5, abs=0.05)
    assert measuring.lru_hits(choices, 128) == pytest.approx(0.5, abs=0.05)


def test_repeats_are_counted():
    assert measuring.repeats(list(range(40))) == 0.0
    assert measuring.repeats(list(range(20)) * 2) == pytest.approx(26 / 33)
