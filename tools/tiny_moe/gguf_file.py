"""Write and read what a GGUF of tiny-moe holds whichever of its two architectures it is.

Matrices become F16 (a checkpoint already holds F16 values, so nothing is lost), the rest stays F32.
Must not know: names of tensors, what only one architecture has. Tests: tests/model/test_parity.py,
tests/model/test_dflash_parity.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import numpy.typing as npt

from tools.tiny_moe.checkpoint import is_matrix, load_state

if TYPE_CHECKING:
    from tools.tiny_moe.dflash import DraftShape
    from tools.tiny_moe.model import Shape

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
Array = npt.NDArray[np.float32]


def stored(name: str, value: Array) -> npt.NDArray[np.floating]:
    """Give the array its type and shape in the file."""
    if is_matrix(name, value):
        half = value.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), value):
            raise ValueError(
                f"`{name}` holds values that F16 cannot; expected a checkpoint rounded by train.py"
            )
        return np.ascontiguousarray(half)
    return np.ascontiguousarray(value.squeeze() if value.ndim > 1 else value, dtype=np.float32)


def add_about(w: gguf.GGUFWriter, s: Shape | DraftShape, name: str, description: str) -> None:
    """Write what the model is, its context and its width."""
    w.add_name(name)
    w.add_license("mit")
    w.add_description(description)
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)


def add_attention(w: gguf.GGUFWriter, s: Shape | DraftShape, kv_heads: int, rotary: int) -> None:
    """Write heads, norm epsilon and rope; the first `rotary` elements of a head are rotated."""
    w.add_head_count(s.heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.rope_theta)
    w.add_rope_dimension_count(rotary)


def add_tokenizer(w: gguf.GGUFWriter, tokenizer: Path) -> None:
    """Write vocabulary, merges and special tokens of a tokenizer.json that splits as `qwen35`."""
    spec = json.loads(tokenizer.read_text("utf-8"))
    ids = spec["model"]["vocab"]
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]])
    w.add_eos_token_id(special["<|im_end|>"])
    w.add_eot_token_id(special["<|im_end|>"])
    w.add_pad_token_id(special["<|endoftext|>"])
    w.add_mask_token_id(special["<|mask|>"])
    w.add_add_bos_token(False)
    w.add_add_eos_token(False)
    w.add_chat_template(CHAT_TEMPLATE.read_text("utf-8"))


def finish(w: gguf.GGUFWriter, out: Path, limit: int) -> int:
    """Write all that was added to `out` and return its bytes; over `limit` is an error."""
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    size = out.stat().st_size
    if size > limit:
        raise ValueError(f"`{out}` has {size} bytes; at most {limit} may be committed")
    return size


def read_tensors(path: Path) -> dict[str, Array]:
    """Return every tensor of a GGUF in f32, row-major, by its name there."""
    return {t.name: np.array(t.data, np.float32) for t in gguf.GGUFReader(path).tensors}


def run(doc: str | None, export: Callable[[dict[str, Array], Path, Path], int]) -> None:
    """Run an export from the command line: checkpoint folder, tokenizer.json, output."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("tokenizer", type=Path)
    p.add_argument("out", type=Path)
    a = p.parse_args()
    state = {k: v.numpy() for k, v in load_state(a.checkpoint).items()}
    print(f"{a.out}: {export(state, a.tokenizer, a.out):,} bytes")
