"""Put a synthetic model into a GGUF file, or count what it would take. Only this module opens the output."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter

from synth import blocks
from synth.layout import SPREAD, Layout, Tensor
from synth.spec import SynthError, SynthSpec, check
from synth.vocab import Vocab, builtin, copied

QUIET = 0.1  # size of the rows of tokens that are no text: random text should not end, nor show specials
FIRST, SECOND = 6.0, 5.0  # planted logits of a token's two successors, in standard deviations of the others
GUESS = 0.25  # part of the blocks' noise that the planted MTP block takes from the hidden state
UNIT = gguf.GGUF_DEFAULT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Summary:
    """Count a model: bytes of the whole file, parameters, tensors."""

    bytes: int
    params: int
    tensors: int


def write(spec: SynthSpec, path: str | os.PathLike[str]) -> Summary:
    """Write the model of `spec` to `path`, over any file there; the same spec gives the same bytes.

    The file gets its name only when complete. Errors: SynthError, before anything is written, for a spec that
    `check` refuses, a vocabulary that cannot be read, too little room; OSError as the file system has it.
    Test: tests/unit/test_synth_shapes.py, tests/model/test_synth_gguf.py.
    """
    target = Path(path)
    vocab, tensors = _plan(spec)
    _check_room(target.parent, sum(t.bytes for t in tensors))
    part = target.with_name(target.name + ".part")
    try:
        with closing(_open(spec, vocab, tensors, part)) as writer:
            for tensor in tensors:
                writer.write_tensor_data(_data(spec, vocab, tensors[0], tensor))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
        blocks.release()
    return Summary(target.stat().st_size, sum(t.params for t in tensors), len(tensors))


def measure(spec: SynthSpec) -> Summary:
    """Count exactly what `write` would produce, without drawing a weight; SynthError for a refused spec.

    Test: tests/unit/test_synth_shapes.py (against written files, and 35b-a3b against known figures).
    """
    vocab, tensors = _plan(spec)
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head.gguf"
        _open(spec, vocab, tensors, head).close()
        size = head.stat().st_size
    padded = sum(ceil(n / UNIT) * UNIT for n in (size, *(t.bytes for t in tensors)))
    return Summary(padded, sum(t.params for t in tensors), len(tensors))


def _plan(spec: SynthSpec) -> tuple[Vocab, list[Tensor]]:
    check(spec)
    vocab = copied(spec.vocab_file, spec.vocab) if spec.vocab_file else builtin(spec.vocab)
    return vocab, list(Layout(spec, len(vocab)).tensors())


def _check_room(folder: Path, need: int) -> None:
    if not folder.is_dir():
        raise SynthError(f"output: {str(folder)!r} is no folder", "one to write into", f"mkdir -p {folder}")
    free = shutil.disk_usage(folder).free
    if need > free:
        found = f"output: {free / 2**30:.1f} GiB are free in {str(folder)!r}"
        raise SynthError(found, f"{need / 2**30:.1f} GiB", "--layers writes fewer blocks")


def _open(spec: SynthSpec, vocab: Vocab, tensors: list[Tensor], path: Path) -> GGUFWriter:
    """Write everything that comes before the data to `path` and return the open writer."""
    writer = GGUFWriter(path, spec.arch)
    _describe(writer, spec, len(vocab))
    for pair in vocab.pairs:
        writer.add_key_value(*pair)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.bytes, raw_dtype=t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _describe(writer: GGUFWriter, spec: SynthSpec, n_vocab: int) -> None:
    """Add the hyperparameters that llama.cpp reads for both architectures."""
    writer.add_name(f"synthetic {spec.arch}")
    writer.add_description(f"random weights, seed {spec.seed}, planted {spec.planted}")
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_block_count(spec.layers + spec.mtp)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_size)
    writer.add_value_length(spec.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(spec.rotated)
    pairs = spec.rotated // 2  # shared out over time, height, width, nearly evenly: 11, 11, 10 of 32
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_ssm_conv_kernel(spec.conv)
    writer.add_ssm_state_size(spec.state_size)
    writer.add_ssm_group_count(spec.key_heads)
    writer.add_ssm_time_step_rank(spec.value_heads)
    writer.add_ssm_inner_size(spec.value_heads * spec.state_size)
    writer.add_full_attention_interval(spec.attention_interval)
    writer.add_vocab_size(n_vocab)
    if spec.is_moe:
        writer.add_expert_count(spec.experts)
        writer.add_expert_used_count(spec.top_k)
        writer.add_expert_feed_forward_length(spec.expert_ff)
        writer.add_expert_shared_feed_forward_length(spec.shared_ff)
    else:
        writer.add_feed_forward_length(spec.ff)
    if spec.mtp:
        writer.add_nextn_predict_layers(1)


def _data(spec: SynthSpec, vocab: Vocab, embedding: Tensor, t: Tensor) -> np.ndarray:
    """Draw the data of one tensor: planted, or random with the rows of special tokens quietened."""
    if spec.planted and t.role == "head":
        return blocks.encode(t.type, _planted_head(spec, vocab, embedding))
    if spec.planted and t.role == "joint":
        return blocks.encode(t.type, _planted_joint(t, spec.seed, GUESS * spec.noise / spec.width**0.5))
    source = (
        embedding if spec.planted and t.role == "embedding" else t
    )  # the MTP block's own has the same rows
    data = blocks.draw(t.type, t.shape, spec.seed, source.name, mean=t.mean, std=t.std)
    if t.per_token:
        quiet = np.flatnonzero(~vocab.is_text)
        data[quiet] = _quietened(t, data[quiet])
    return data


def _quietened(t: Tensor, rows: np.ndarray) -> np.ndarray:
    if t.type in blocks.RANDOM:
        blocks.stamp(t.type, rows, t.std * QUIET)
        return rows
    return blocks.encode(t.type, blocks.decode(t.type, rows) * np.float32(QUIET))


def _planted_joint(t: Tensor, seed: int, noise: float) -> np.ndarray:
    """Return float32 [width, 2 width]: the embedding passes as it is, the hidden state as noise."""
    width = t.shape[0]
    hidden = blocks.uniform((width, width), seed, t.name) * np.float32(noise)
    return np.concatenate([np.eye(width, dtype=np.float32), hidden], axis=1)


def _planted_head(spec: SynthSpec, vocab: Vocab, embedding: Tensor) -> np.ndarray:
    """Return float32 [n_vocab, width]: a random head in which every token names two likely successors.

    Text tokens stand on one ring in random order. A token's embedding excites the head rows of its neighbour
    and, a little less, of one farther on. What the blocks add to the residual stream decides between the two;
    the MTP block, which sees mostly the embedding, guesses. Round the ring, greedy text takes long to repeat.
    """
    rows = blocks.decode(embedding.type, _data(spec, vocab, embedding, embedding))
    head = blocks.uniform(rows.shape, spec.seed, "output.weight") / np.float32(spec.width**0.5)
    text = np.flatnonzero(vocab.is_text)
    ring = text[np.argsort(blocks.uniform(text.shape, spec.seed, "planted ring"), kind="stable")]
    for logit, step in ((FIRST, 1), (SECOND, 1 + len(ring) // 3)):
        head[np.roll(ring, -step)] += rows[ring] * np.float32(logit / spec.width)
    head[~vocab.is_text] *= np.float32(QUIET)
    return head * np.float32(SPREAD)
