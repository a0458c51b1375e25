"""Drafters that do not fit, as `draftwood doctor` tells it from the headers and as loading one tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftwood import Llama
from draftwood.engine.engine import probe_drafter
from draftwood.errors import DraftwoodError, ModelFileError
from synth_gguf import PRESETS, DrafterSpec, write

from tests.model.test_dflash import DRAFTER, TARGET, rewrite


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(DraftwoodError) as caught:
        call()
    assert caught.value.hint
    return caught.value.message


def both(drafter: Path, model: Path = TARGET) -> str:
    """Return what the headers and what loading says, which must be the same."""
    settings = {"speculation": "dflash", "n_ctx": 64, "n_threads": 1, "verbose": False}
    words = said(lambda: probe_drafter(str(drafter), str(model)))
    loading = said(lambda: Llama(str(model), drafter=str(drafter), **settings))
    named = "" if str(drafter) in words else f" (drafter={str(drafter)!r})"
    assert loading == words + named
    return words


def test_drafters_that_fit(gguf, tmp_path):
    probe_drafter(str(DRAFTER), str(TARGET))
    spec = PRESETS["moe-mtp"]
    write(DrafterSpec(spec), tmp_path / "drafter.gguf")
    probe_drafter(str(tmp_path / "drafter.gguf"), gguf("moe-mtp"))


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("dflash.target_layers", [1, 4, 7, 9, 40], "reads layer 40 of its target"),
        ("dflash.block_size", 1, "block_size is 1"),
        ("dflash.attention.value_length", 32, "value_length is 32; expected 64, attention.key_length"),
        ("dflash.rope.dimension_count", 63, "dimension_count is 63; expected a multiple of 2"),
        (
            "dflash.rope.dimension_count",
            128,
            "dimension_count is 128; expected 2 to 64 (attention.key_length)",
        ),
    ],
)
def test_another_shape(tmp_path, name, value, found):
    path = rewrite(DRAFTER, tmp_path / "d.gguf", change=lambda n, old: value if n == name else old)
    assert found in both(path)


def test_other_kinds(tmp_path):
    import numpy as np

    assert "has dflash.selector_rank" in both(
        rewrite(DRAFTER, tmp_path / "a.gguf", add_keys={"dflash.selector_rank": 2})
    )
    tensors = {"d2t": np.zeros((4, 4), np.float32)}
    assert "has a tensor d2t" in both(rewrite(DRAFTER, tmp_path / "b.gguf", add_tensors=tensors))
    assert "no mask token" in both(
        rewrite(DRAFTER, tmp_path / "c.gguf", drop=("tokenizer.ggml.mask_token_id",))
    )
    assert "architecture 'qwen35moe'" in both(TARGET)


def test_a_drafter_of_another_model(gguf, tmp_path):
    write(DrafterSpec(PRESETS["moe-mtp"]), tmp_path / "d.gguf")
    assert both(tmp_path / "d.gguf") == "the drafter has a vocabulary of 384 tokens, the target one of 4096"

    def change(name: str, value: Any) -> Any:
        return [*value[:1000], "another", *value[1001:]] if name == "tokenizer.ggml.tokens" else value

    assert "token 1000 is 'another'" in both(rewrite(DRAFTER, tmp_path / "t.gguf", change=change))
    shallow = gguf("moe-mtp", vocab_file=str(TARGET), vocab=4096)
    assert "this one has 4 layers" in both(DRAFTER, Path(shallow))
    wide = gguf("moe-mtp", vocab_file=str(TARGET), vocab=4096, layers=12, width=512)
    assert "layers of the target's width 512" in both(DRAFTER, Path(wide))


def test_a_token_without_text(tmp_path):
    """llama.cpp's loader names such a token; both sides of the comparison must."""

    def change(name: str, value: Any) -> Any:
        return [*value[:1000], "", *value[1001:]] if name == "tokenizer.ggml.tokens" else value

    model = rewrite(TARGET, tmp_path / "m.gguf", change=change)
    assert "token 1000 is '" in both(DRAFTER, model)
    assert "'[EMPTY_1000]' to the target" in both(DRAFTER, model)
    fits = rewrite(DRAFTER, tmp_path / "d.gguf", change=change)
    probe_drafter(str(fits), str(model))
    Llama(str(model), drafter=str(fits), speculation="dflash", n_ctx=64, n_threads=1, verbose=False).close()


def test_a_target_of_another_kind():
    found = said(lambda: probe_drafter(str(DRAFTER), str(DRAFTER)))
    assert found.endswith("found target architecture 'dflash'")


def test_files_that_cannot_be_read(tmp_path):
    assert "cannot be opened" in said(lambda: probe_drafter(str(tmp_path / "none.gguf"), str(TARGET)))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DRAFTER.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="cut off"):
        probe_drafter(str(cut), str(TARGET))


def test_doctor_says_no_and_why(tmp_path):
    write(DrafterSpec(PRESETS["moe-mtp"]), tmp_path / "d.gguf")
    command = [
        sys.executable,
        "-m",
        "draftwood",
        "doctor",
        TARGET,
        "--drafter",
        tmp_path / "d.gguf",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    words = "the drafter has a vocabulary of 384 tokens, the target one of 4096"
    assert {"name": "DFlash drafting", "on": False, "reason": words} in found["paths"]
    fix = "name the drafter that was made for this model, or none"
    assert found["problems"] == [{"found": words, "fix": fix}]
