"""The tokenizer of a synthetic model: a byte-level BPE made in code, or a copy out of another GGUF.

Built-in ids: 0..255 are the bytes, then merged tokens, then the three specials at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFValueType, TokenType

from synth.spec import SynthError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
COMMON = " etaoinshrdlucmfwypvbgkjqxz\n.,_()="  # merged first, so that small vocabularies hold readable pairs


@dataclass(frozen=True, slots=True)
class Vocab:
    """Hold the tokenizer.* entries of a file, as (key, value, type, element type), and which ids are text."""

    pairs: tuple[tuple[str, object, GGUFValueType, GGUFValueType | None], ...]
    is_text: np.ndarray  # bool [n_tokens]; the others are specials and padding, which random text avoids

    def __len__(self) -> int:
        return len(self.is_text)


def builtin(size: int) -> Vocab:
    """Make a byte-level BPE of `size` tokens; SynthError under 260 (bytes, one merge, specials)."""
    n_merged = size - 256 - len(SPECIALS)
    if n_merged < 1:
        expected = f"at least {257 + len(SPECIALS)}: 256 bytes, a merge and {len(SPECIALS)} special tokens"
        raise SynthError(f"synthetic model: vocab is {size}", expected, "--set vocab=384")
    merges = list(islice(_merges(), n_merged))
    tokens = [*byte_letters(), *(left + right for left, right in merges), *SPECIALS]
    types = [TokenType.NORMAL] * (size - len(SPECIALS)) + [TokenType.CONTROL] * len(SPECIALS)
    text, number, flag = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.BOOL
    return Vocab(
        pairs=(
            ("tokenizer.ggml.model", "gpt2", text, None),
            ("tokenizer.ggml.pre", "qwen35", text, None),
            ("tokenizer.ggml.tokens", tokens, GGUFValueType.ARRAY, text),
            ("tokenizer.ggml.token_type", [int(t) for t in types], GGUFValueType.ARRAY, GGUFValueType.INT32),
            ("tokenizer.ggml.merges", [" ".join(pair) for pair in merges], GGUFValueType.ARRAY, text),
            ("tokenizer.ggml.bos_token_id", size - 3, number, None),
            ("tokenizer.ggml.padding_token_id", size - 3, number, None),
            ("tokenizer.ggml.eos_token_id", size - 1, number, None),
            ("tokenizer.ggml.add_bos_token", False, flag, None),
            ("tokenizer.chat_template", TEMPLATE, text, None),
        ),
        is_text=np.array([t == TokenType.NORMAL for t in types]),
    )


def copied(path: str, size: int) -> Vocab:
    """Copy the tokenizer of the GGUF at `path`, filled up to `size` with unused tokens, or SynthError."""
    hint = "leave --vocab out to get the built-in tokenizer"
    if not Path(path).is_file():
        raise SynthError(f"vocabulary: {path!r} is not a file", "a GGUF", hint)
    try:
        found = gguf.GGUFReader(path).fields
    except (ValueError, IndexError, KeyError) as error:
        raise SynthError(f"vocabulary: {path!r} cannot be read ({error})", "a GGUF", hint) from error
    values = {k: f for k, f in found.items() if k.startswith("tokenizer.")}
    if not {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= values.keys():
        raise SynthError(
            f"vocabulary: {path!r} has no token list with types", "a GGUF with a tokenizer", hint
        )
    n_pad = max(0, size - len(values["tokenizer.ggml.tokens"].data))
    padding = {
        "tokenizer.ggml.tokens": [f"[PAD{i}]" for i in range(n_pad)],
        "tokenizer.ggml.token_type": [int(TokenType.UNUSED)] * n_pad,
        "tokenizer.ggml.scores": [-1e9] * n_pad,
    }
    pairs, types = [], []
    for key, field in values.items():
        value = field.contents()
        if key in padding:
            value = [*value, *padding[key]]
        if key == "tokenizer.ggml.token_type":
            types = value
        pairs.append((key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None))
    spoken = (TokenType.NORMAL, TokenType.BYTE, TokenType.USER_DEFINED)
    return Vocab(tuple(pairs), np.isin(types, [int(t) for t in spoken]))


def byte_letters() -> list[str]:
    """Return the visible letter that stands for each byte 0..255 in byte-level BPE (GPT-2's table)."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Yield 16 million merge rules: all pairs of bytes, common letters first, then a pair and a byte."""
    letters = byte_letters()
    first = [ord(c) for c in COMMON]
    ranked = [letters[b] for b in chain(first, (b for b in range(256) if b not in first))]
    order = {letter: rank for rank, letter in enumerate(ranked)}
    pairs = sorted(product(ranked, ranked), key=lambda p: (max(order[p[0]], order[p[1]]), order[p[0]]))
    yield from pairs
    yield from product((left + right for left, right in pairs), ranked)
