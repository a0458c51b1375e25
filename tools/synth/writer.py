"""Put a synthetic model into a GGUF file, or count what it would take. Only this module opens the output."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
from gguf import GGUFWriter

from synth import blocks
from synth.dflash import Drafter, DrafterSpec
from synth.layout import Tensor
from synth.spec import SynthError, SynthSpec
from synth.target import Target
from synth.vocab import Vocab

UNIT = gguf.GGUF_DEFAULT_ALIGNMENT
WORKERS = 16  # at most: each holds a tensor, up to 400 MB of the largest models


class Model(Protocol):
    """What is written: Target or Drafter."""

    arch: str
    vocab: Vocab
    tensors: list[Tensor]

    def describe(self, writer: GGUFWriter) -> None:
        """Add the hyperparameters."""

    def prepare(self) -> None:
        """Make what the tensors share."""

    def data(self, t: Tensor) -> np.ndarray:
        """Draw one tensor; called from several threads."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Count a model: bytes of the whole file, parameters, tensors."""

    bytes: int
    params: int
    tensors: int


def write(spec: SynthSpec | DrafterSpec, path: str | os.PathLike[str]) -> Summary:
    """Write the model of `spec` to `path`, over any file there; the same spec gives the same bytes.

    The file gets its name only when complete. Errors: SynthError, before anything is written, for a spec that
    `check` refuses, a vocabulary that cannot be read, too little room; OSError as the file system has it.
    Test: tests/unit/test_synth_shapes.py, tests/model/test_synth_gguf.py.
    """
    target = Path(path)
    model = _model(spec)
    _check_room(target.parent, sum(t.bytes for t in model.tensors))
    part = target.with_name(target.name + ".part")
    try:
        _write_data(model, part, _write_head(model, part))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
        blocks.release()
    return Summary(target.stat().st_size, sum(t.params for t in model.tensors), len(model.tensors))


def measure(spec: SynthSpec | DrafterSpec) -> Summary:
    """Count exactly what `write` would produce, without drawing a weight; SynthError for a refused spec.

    Test: tests/unit/test_synth_shapes.py (against written files, and 35b-a3b against known figures).
    """
    model = _model(spec)
    with tempfile.TemporaryDirectory() as folder:
        size = _write_head(model, Path(folder) / "head.gguf")
    total = _offsets(size, model.tensors)[-1]
    return Summary(total, sum(t.params for t in model.tensors), len(model.tensors))


def _model(spec: SynthSpec | DrafterSpec) -> Model:
    return Drafter(spec) if isinstance(spec, DrafterSpec) else Target(spec)


def _check_room(folder: Path, need: int) -> None:
    if not folder.is_dir():
        raise SynthError(f"output: {str(folder)!r} is no folder", "one to write into", f"mkdir -p {folder}")
    free = shutil.disk_usage(folder).free
    if need > free:
        found = f"output: {free / 2**30:.1f} GiB are free in {str(folder)!r}"
        raise SynthError(found, f"{need / 2**30:.1f} GiB", "--layers writes fewer blocks")


def _write_head(model: Model, path: Path) -> int:
    """Write everything that comes before the data to `path`; return its size."""
    writer = GGUFWriter(path, model.arch)
    model.describe(writer)
    for pair in model.vocab.pairs:
        writer.add_key_value(*pair)
    for t in model.tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.bytes, raw_dtype=t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path.stat().st_size


def _offsets(head: int, tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor begins in the file, and where the last one's padding ends."""
    sizes = [head, *(t.bytes for t in tensors)]
    return list(accumulate(ceil(size / UNIT) * UNIT for size in sizes))


def _write_data(model: Model, path: Path, head: int) -> None:
    """Draw and write the tensors side by side: drawing is copying of pools, so the disk sets the pace."""
    *offsets, end = _offsets(head, model.tensors)
    model.prepare()
    with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(_workers()) as workers:
        file.truncate(end)

        def put(tensor: Tensor, offset: int) -> None:
            view = memoryview(np.ascontiguousarray(model.data(tensor))).cast("B")
            while view:  # one call writes at most 2 GiB
                n = os.pwrite(file.fileno(), view, offset)
                view, offset = view[n:], offset + n

        for _ in workers.map(put, model.tensors, offsets):
            pass


def _workers() -> int:
    return min(WORKERS, os.cpu_count() or 1)
