"""tiny-moe's GGUF in llama.cpp against transformers' float32 modules, and our training model against both.

Slow: needs tools/tiny_moe/requirements.txt (torch, transformers), which `make test-full` installs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for name in ("torch", "transformers", "tokenizers"):  # found, not imported: that takes seconds
    if importlib.util.find_spec(name) is None:
        reason = f"{name} is not installed: pip install -r tools/tiny_moe/requirements.txt"
        pytest.skip(reason, allow_module_level=True)

# Libraries of the reference warn of what does not touch its numbers.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    return torch


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    from tools.tiny_moe.parity import compare

    return compare(GGUF, positions=2000)


@pytest.mark.parametrize("kind", ["target", "rows", "mtp", "mtp_rows"])
def test_gguf_equals_transformers(figures: dict[str, dict[str, float]], kind: str) -> None:
    from tools.tiny_moe.parity import BOUNDS

    for name, value in figures[kind].items():
        assert value <= BOUNDS[name], (kind, name, value)
    assert ("kl" in figures[kind]) == (kind in {"target", "mtp"})


def test_parity_sees_a_wrong_weight(torch: Any, tmp_path: Path) -> None:
    """A weight of the MTP block off by 30 % must show in the MTP figures and nowhere else."""
    from tools.tiny_moe import parity
    from tools.tiny_moe.checkpoint import rounded
    from tools.tiny_moe.export import export, state_of

    state = {k: torch.from_numpy(v) for k, v in state_of(GGUF).items()}
    state["mtp.layers.0.self_attn.v_proj.weight"] = state["mtp.layers.0.self_attn.v_proj.weight"] * 1.3
    changed = {k: v.float().numpy() for k, v in rounded(state).items()}
    export(changed, ROOT / "models" / "tiny-moe" / "tokenizer.json", tmp_path / "wrong.gguf")
    found = parity.compare(tmp_path / "wrong.gguf", positions=252, reference_of=GGUF)
    assert found["target"]["l2"] <= parity.BOUNDS["l2"]
    assert found["mtp"]["l2"] > parity.BOUNDS["l2"]


def test_training_model_equals_transformers(torch: Any) -> None:
    """Logits, rows and first-depth MTP rows of our compact model, f32; 1e-4 is summation order."""
    from tools.tiny_moe.export import state_of
    from tools.tiny_moe.model import TINY, TinyMoe
    from tools.tiny_moe.parity import texts
    from tools.tiny_moe.reference import reference

    state = {k: torch.from_numpy(v) for k, v in state_of(GGUF).items()}
    model = TinyMoe()
    model.load_state_dict(state)
    ids = torch.tensor(texts(252))
    with torch.no_grad():
        h, _ = model.model(ids)
        rows, _ = model.draft_rows(ids, h, 1)
        wanted_h, wanted_logits, wanted_rows, _ = reference(state, TINY)(ids)
        logits = model.logits(h)
    for found, wanted in ((h, wanted_h), (logits, wanted_logits), (rows[0], wanted_rows)):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_unrolled_depths_equal_a_draft_cache(torch: Any) -> None:
    """Depth 3 at one position, from an explicit cache as the engine keeps it, equals `draft_rows`."""
    from tools.tiny_moe.model import TinyMoe

    torch.manual_seed(0)
    model, t, at = TinyMoe(), 24, 17
    ids = torch.randint(4096, (1, t))
    with torch.no_grad():
        h, _ = model.model(ids)
        wanted = model.draft_rows(ids, h, 3)[0][2][:, at]
        # A cache of trunk-fed entries up to the chain's start, then each draft fed by the row before it.
        emb = model.model.embed_tokens(ids[:, 1:]).float()
        fed = h[:, : at - 1].clone()
        for _ in range(2):
            row = model.mtp.step(emb[:, : fed.shape[1]], fed, [])[0]
            fed = torch.cat([fed, row[:, -1:]], 1)
        found = model.mtp.step(emb[:, : fed.shape[1]], fed, [])[0][:, -1]
    assert fed.shape[1] == at + 1
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_tokenizer_cuts_as_llama_cpp() -> None:
    from tokenizers import Tokenizer

    from tools.tiny_moe.corpus import MODEL, read_heldout
    from tools.tiny_moe.native import Native

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    awkward = [
        "",
        " ",
        "\n\n  x",
        "it's IT'S",
        "naïve café\u0301 日本語 🙂",
        "a\r\n\tb",
        "12345",
    ]
    with Native(GGUF) as native:
        for text in [*(r["text"] for r in read_heldout()), *awkward]:
            assert native.tokenize(text) == tokenizer.encode(text).ids, text


def test_state_survives_the_gguf(tmp_path: Path) -> None:
    """export(state_of(file)) has the file's F16 tensors exactly and its F32 ones but for a last bit."""
    from gguf import GGUFReader

    from tools.tiny_moe.export import export, state_of

    export(state_of(GGUF), ROOT / "models" / "tiny-moe" / "tokenizer.json", tmp_path / "again.gguf")
    files = (tmp_path / "again.gguf", GGUF)
    found, wanted = ({t.name: t.data for t in GGUFReader(path).tensors} for path in files)
    assert found.keys() == wanted.keys()
    for name, a in found.items():
        assert a.dtype == wanted[name].dtype
        np.testing.assert_allclose(a, wanted[name], rtol=0 if a.dtype == np.float16 else 1e-6)


def test_tokenizer_json_is_what_the_gguf_holds() -> None:
    from gguf import GGUFReader

    from tools.tiny_moe.corpus import MODEL

    vocab = json.loads((MODEL / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    tokens = GGUFReader(GGUF).fields["tokenizer.ggml.tokens"].contents()
    assert tokens == sorted(vocab, key=vocab.__getitem__)
