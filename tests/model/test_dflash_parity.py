"""The DFlash drafter of tiny-moe in llama.cpp against the torch module it was trained as.

Slow: needs tools/tiny_moe/requirements.txt (torch, transformers), which `make test-full` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: tools/tiny_moe/requirements.txt")
pytest.importorskip("transformers", reason="transformers is not installed: tools/tiny_moe/requirements.txt")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: tools/tiny_moe/requirements.txt")

from tools.tiny_moe import dflash_parity as parity  # noqa: E402
from tools.tiny_moe.dflash import DRAFT, DFlash, DraftShape, read  # noqa: E402
from tools.tiny_moe.dflash_evaluate import hits, target  # noqa: E402
from tools.tiny_moe.dflash_export import export, load  # noqa: E402
from tools.tiny_moe.dflash_native import Drafter  # noqa: E402
from tools.tiny_moe.model import TinyMoe  # noqa: E402
from tools.tiny_moe.parity import BOUNDS, texts  # noqa: E402
from tools.tiny_moe.yarn import Yarn, frequencies  # noqa: E402

# Libraries of the reference warn of what does not touch its numbers.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models" / "tiny-moe"
DRAFTER, TARGET = MODELS / "dflash-f16.gguf", MODELS / "tiny-moe-f16.gguf"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(shape, mrope=..., **scaled) -> the committed drafter as another file, weights scaled by name."""

    def make(shape: DraftShape = DRAFT, *, mrope: bool = True, **scaled: float) -> Path:
        state = {k: v.numpy() for k, v in load(DRAFTER).state_dict().items()}
        for part, factor in scaled.items():
            for name in [n for n in state if part in n]:
                state[name] = (state[name] * factor).astype(np.float16).astype(np.float32)
        out = tmp_path / "drafter.gguf"
        export(state, MODELS / "tokenizer.json", out, shape, mrope=mrope)
        return out

    return make


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take many times as long beside another program."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> TinyMoe:
    return target()


def within(figures: dict[str, float], *names: str) -> None:
    for name in names or BOUNDS:
        assert figures[name] <= BOUNDS[name], (name, figures)


def test_gguf_equals_torch() -> None:
    figures = parity.compare(DRAFTER, positions=2000)
    assert figures["drafts"] >= 2000
    within(figures)


def test_short_blocks_and_plain_positions_equal_torch(write: Write) -> None:
    """Four drafts, by a file without M-RoPE sections: positions come one a row, nothing else differs."""
    within(parity.compare(write(mrope=False), positions=400, depth=4))


def test_parity_sees_a_wrong_weight(write: Write) -> None:
    figures = parity.compare(write(o_proj=1.3), positions=100, reference_of=DRAFTER)
    assert figures["l2"] > BOUNDS["l2"]


@pytest.mark.parametrize("mrope", [True, False])
def test_yarn_equals_the_oracle(write: Write, mrope: bool) -> None:
    """Factor 64, betas 32/1, up to the last position of 64 times the original context."""
    shape = replace(DRAFT, yarn=Yarn(64, 512))
    path, last = write(shape, mrope=mrope), 64 * 512 - parity.LENGTH
    within(parity.compare(path, 450, shape=shape, first=last))
    plain = parity.compare(path, 100, first=last)
    assert plain["l2"] > 5 * BOUNDS["l2"]


def test_yarn_at_a_quarter_million(write: Write) -> None:
    """There an f32 angle is off by up to 0.01: distributions hold, a first choice in a hundred may not."""
    shape = replace(DRAFT, yarn=Yarn(64, 4096))
    figures = parity.compare(write(shape), 450, shape=shape, first=64 * 4096 - parity.LENGTH)
    within(figures, "l2", "kl")
    assert figures["differ"] <= 0.03


def test_other_betas_need_the_context_parameters(write: Write) -> None:
    """The pin's loader ignores a drafter's betas. If the second half fails, drop `betas`."""
    shape = replace(DRAFT, yarn=Yarn(64, 512, 16, 2))
    path = write(shape)
    within(parity.compare(path, 200, shape=shape))
    assert parity.compare(path, 100, shape=shape, betas=False)["l2"] > 5 * BOUNDS["l2"]


def test_yarn_equals_transformers() -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for dim, theta, yarn in ((64, 1e4, Yarn(64, 512)), (128, 1e7, Yarn(64, 4096, 32, 1))):
        config = Qwen3Config(
            hidden_size=4 * dim,
            head_dim=dim,
            num_attention_heads=4,
            max_position_embeddings=int(yarn.factor * yarn.original),
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
            },
        )
        wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        found = frequencies(dim, theta, yarn)
        np.testing.assert_allclose(found[0], wanted.numpy(), rtol=1e-5)
        assert found[1] == pytest.approx(magnitude)


def test_drafts_through_the_c_api_equal_torch(model: TinyMoe) -> None:
    """A text drafted round by round: llama.cpp proposes what torch does, up to near ties.

    Rounds go on by what torch accepts, so that one near tie does not move those after it. A tie is near if
    its gap in torch's logits is within the difference of the two libraries' logits in the same row.
    """
    drafter, depth, start = load(DRAFTER), 8, 128
    ids = texts(252)[0]
    hit = hits(model, drafter, torch.tensor([ids]), depth, start)[0]
    embed = model.model.embed_tokens.weight
    features = read(model.model, torch.tensor([ids]), DRAFT.taps)[0]
    same = ties = 0
    with Drafter(TARGET, DRAFTER) as native:
        rows, _ = native.read(ids)
        fed, t = 0, start
        while t + depth < len(ids):
            native.inject(rows[fed:t], np.arange(fed, t))
            fed = t
            found = native.logits(ids[t], t, depth)[1:]
            wanted = drafter.draft(features[:, :t], torch.tensor([ids[t]]), depth, embed)[0, 1:].numpy()
            drafts = native.draft(ids[t], t, depth)
            assert drafts == found.argmax(-1).tolist()
            for i, draft in enumerate(drafts):
                if draft == wanted[i].argmax():
                    same += 1
                    assert (draft == ids[t + 1 + i]) == bool(hit[t, i])
                    continue
                ties += 1
                gap = wanted[i].max() - wanted[i, draft]
                assert gap <= 2 * np.abs(found[i] - wanted[i]).max(), (t, i, gap)
            t += 1 + int(hit[t].long().cumprod(0).sum())
    assert ties <= 0.02 * (same + ties), (same, ties)


def test_rejected_features_leave_no_trace(model: TinyMoe) -> None:
    """Features of rejected tokens, cut out again, and features injected in pieces change no logit's bit."""
    ids = texts(252)[0]
    with Drafter(TARGET, DRAFTER) as native:
        rows, _ = native.read(ids)
        native.inject(rows[:100], range(100))
        wanted = native.logits(ids[100], 100, 15)
        native.clear()
        native.inject(rows[:90], range(90))
        native.logits(ids[90], 90, 7)
        native.inject(rows[150:159], range(90, 99))
        native.cut(90)
        native.inject(rows[90:100], range(90, 100))
        found = native.logits(ids[100], 100, 15)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3 * np.abs(wanted).max())
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize(("kind", "agree"), [("Q8_0", 0.97), ("Q4_K_M", 0.70)])
def test_quantised_drafters(tmp_path: Path, kind: str, agree: float) -> None:
    from bench.models import quantise

    out = tmp_path / f"{kind}.gguf"
    quantise(DRAFTER, out, kind)
    assert out.stat().st_size < 0.7 * DRAFTER.stat().st_size
    figures = parity.compare(out, 450, reference_of=DRAFTER)
    assert figures["l2"] > 0
    assert figures["differ"] <= 1 - agree, figures


def test_a_block_sees_its_own_context_only(model: TinyMoe) -> None:
    """Blocks of many anchors at once equal one block each, whatever comes later and past their length."""
    torch.manual_seed(0)
    drafter, t = DFlash(replace(DRAFT, layers=2)), 60
    ids = torch.randint(4, 4096, (2, t))
    embed = torch.randn(4096, DRAFT.width)
    features = torch.randn(2, t, len(DRAFT.taps) * DRAFT.width)
    anchors, lengths = torch.tensor([[5, 40], [17, 31]]), torch.tensor([[16, 5], [9, 2]])
    with torch.no_grad():
        rows = drafter.blocks(features, ids, anchors, lengths, embed)
        for b in range(2):
            for a in range(2):
                at, n = int(anchors[b, a]), int(lengths[b, a])
                one = drafter.draft(features[b : b + 1, :at], ids[b : b + 1, at], n - 1, embed)[0]
                found = rows[b, a, :n] @ embed.T
                assert float((found - one).norm() / one.norm()) < 1e-5


def test_writer_equals_reading_anew(model: TinyMoe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's greedy text from recurrent state and caches is the text that re-reading gives."""
    from tools.tiny_moe import evaluate
    from tools.tiny_moe.writer import Writer

    monkeypatch.setattr(evaluate, "PROMPT", 70)
    monkeypatch.setattr(evaluate, "NEW", 12)
    start = torch.tensor(texts(3 * 252))[:, :70]
    wanted = evaluate.generate(model, start, 0.0)
    writer = Writer(model, len(start), 70, 82, torch.float32)
    assert torch.equal(writer.write(start, torch.zeros(len(start), 1)), wanted)
    hot = writer.write(start, torch.full((len(start), 1), 5.0))
    assert not torch.equal(hot, wanted)
    assert torch.equal(hot[:, :70], start)


def test_draft_loss_by_hand() -> None:
    """Two drafts of one block: the second counts a quarter once the first is wrong, decayed."""
    from tools.tiny_moe.dflash_train import draft_loss

    head = torch.eye(3) * 4
    rows = torch.tensor([[[[1.0, 0, 0], [0, 1.0, 0]]]])
    wanted = torch.tensor([[[[0, 1.0, 0], [0, 1.0, 0]]]])
    labels, used = torch.tensor([[[1, 1]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    loss, (_, tokens) = draft_loss(rows, wanted, labels, head, used, decay=6.0)
    log_q, p = (rows @ head.T).log_softmax(-1), (wanted @ head.T).softmax(-1)
    each = -0.5 * (p * log_q).sum(-1) - 0.5 * log_q[..., 1]
    weight = torch.tensor([1.0, 0.25 * float(np.exp(-1 / 6))])
    assert float(loss) == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-5)
    assert float(tokens) == 1.0
    right = draft_loss(wanted, wanted, labels, head, used, decay=6.0)[1][1]
    assert float(right) == 3.0
