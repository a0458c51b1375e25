"""Models in several files: headers, text, pools of experts, and files that do not belong together."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf as gguf_py
import numpy as np
import pytest
from draftwood import Llama
from draftwood.cli import fused
from draftwood.engine.engine import probe_drafter, probe_model
from draftwood.errors import DraftwoodError, ModelFileError
from draftwood.load import header

from tests.model.rig import PROMPT
from tests.model.split_gguf import split

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
SMALL = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def model(gguf) -> str:
    return gguf("moe-mtp", experts=16, top_k=3, planted=0.5)


@pytest.fixture
def parts(model, tmp_path) -> list[Path]:
    """The files of the model; a test may change them."""
    made = split(model, tmp_path, 20)
    assert len(made) > 3
    return made


def text(path: Path | str, **settings) -> list[int]:
    llm = Llama(str(path), **{**SMALL, **settings})
    try:
        return [token for token, _ in zip(llm.generate(PROMPT, temp=0.0), range(40), strict=False)]
    finally:
        llm.close()


def test_headers_say_what_one_file_says(model, parts):
    whole, found = probe_model(model), probe_model(str(parts[0]))
    assert found.n_files == len(parts)
    assert found.file_bytes == sum(path.stat().st_size for path in parts)
    assert found.can_draft_mtp
    assert found.expert_bytes > 0
    assert replace(found, n_files=1, file_bytes=whole.file_bytes) == whole
    assert header.files(str(parts[0])) == [str(path) for path in parts]
    assert header.tensors(str(parts[0])) == header.tensors(model)
    told = fused.told(header.tensors(str(parts[0])), found)
    assert told == fused.told(header.tensors(model), whole)
    assert told["layers"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": "off"},
        {"speculation": "mtp"},
        {"speculation": "tree"},
        {"speculation": "mtp", "use_mmap": False},
        {"speculation": "mtp", "kv_overrides": {"qwen35moe.context_length": 512}},
    ],
    ids=str,
)
def test_the_text_is_that_of_one_file(model, parts, settings):
    assert text(parts[0], **settings) == text(model, speculation="off")


@pytest.mark.filterwarnings("ignore:.*plain memory")
def test_a_pool_of_its_experts(model, parts):
    n_bytes = probe_model(model).expert_bytes // 2
    llm = Llama(str(parts[0]), **SMALL, expert_vram=n_bytes)
    tokens = [token for token, _ in zip(llm.generate(PROMPT, temp=0.0), range(40), strict=False)]
    stats = llm.expert_stats
    llm.close()
    assert tokens == text(model, speculation="off")
    assert stats.misses > 0
    assert stats.host_bytes >= 2 * n_bytes - 1


def test_experts_that_are_read_ahead(model, parts):
    found = []
    for path in (model, parts[0]):
        llm = Llama(str(path), **SMALL, expert_readahead=True, speculation="off")
        tokens = [token for token, _ in zip(llm.generate(PROMPT, temp=0.0), range(40), strict=False)]
        stats = llm.readahead_stats
        found.append((tokens, stats.layers, stats.expert_bytes, stats.experts_used))
        llm.close()
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_a_drafter_in_several_files(tmp_path):
    target, drafter = TINY / "tiny-moe-f16.gguf", TINY / "dflash-f16.gguf"
    (tmp_path / "target").mkdir()
    (tmp_path / "drafter").mkdir()
    targets = split(target, tmp_path / "target", 60)
    drafters = split(drafter, tmp_path / "drafter", 12)
    assert len(targets) > 1 < len(drafters)
    probe_drafter(str(drafters[0]), str(targets[0]))
    llm = Llama(str(targets[0]), **SMALL, speculation="dflash", drafter=str(drafters[0]))
    tokens = [token for token, _ in zip(llm.generate(PROMPT, temp=0.0), range(40), strict=False)]
    assert llm.speculation_stats.drafted > 0
    llm.close()
    assert tokens == text(target, speculation="off")


def rewrite(path: Path, key: str, value: int) -> None:
    """Change a number of the file's header."""
    reader = gguf_py.GGUFReader(path, "r+")
    field = reader.fields[key]
    field.parts[field.data[0]][0] = value
    reader.data.flush()


def drop(parts: list[Path]) -> None:
    parts[2].unlink()


def cut(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-1000])


def swap(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])


def repeat(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    rewrite(parts[2], "split.no", 2)


def junk(parts: list[Path]) -> None:
    parts[2].write_bytes(b"no model at all")


def uncount(parts: list[Path]) -> None:
    rewrite(parts[0], "split.tensors.count", 7)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (drop, "cannot be opened for reading; expected file 3 of"),
        (cut, "is cut off"),
        (swap, "says that it is file 2 of . of a model; expected file 3 of"),
        (repeat, "two of the . files of .* have a tensor"),
        (junk, "is not a GGUF file"),
        (uncount, "tensors; expected 7"),
    ],
)
def test_files_that_do_not_belong_together(parts, damage, found):
    damage(parts)
    for load in (probe_model, lambda path: Llama(path, **SMALL)):
        with pytest.raises(ModelFileError, match=found) as caught:
            load(str(parts[0]))
        assert isinstance(caught.value, DraftwoodError)
        assert "hint: pass the first of the model's files; the others lie beside it" in str(caught.value)
        named = parts[0] if damage in (uncount, repeat) else parts[2]
        assert named.name in str(caught.value)


def test_another_file_than_the_first(parts):
    with pytest.raises(ModelFileError, match=f"is file 2 of {len(parts)} of a model; expected the first one"):
        Llama(str(parts[1]), **SMALL)


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.gguf", "x"])
def test_a_first_file_of_another_name(parts, name):
    path = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(ModelFileError, match="expected a name that ends in -00001-of-"):
        Llama(str(path), **SMALL)


def test_numbers_of_another_type(parts):
    """llama.cpp asserts that they are of 16 bits."""
    data = parts[1].read_bytes()
    at = data.index(b"split.no") + len(b"split.no")
    assert np.frombuffer(data[at : at + 4], "<u4")[0] == gguf_py.GGUFValueType.UINT16
    kind = int(gguf_py.GGUFValueType.INT16).to_bytes(4, "little")
    parts[1].write_bytes(data[:at] + kind + data[at + 4 :])
    with pytest.raises(
        ModelFileError, match=r"has no split\.no and split\.count of 16 bits; expected file 2 of 5"
    ):
        Llama(str(parts[0]), **SMALL)


@pytest.mark.parametrize(
    ("key", "found"),
    [("split.no", "has no split.no of 16"), ("split.tensors.count", "has no split.tensors.count")],
)
def test_a_first_file_without_numbers(parts, key, found):
    data = parts[0].read_bytes()
    parts[0].write_bytes(data.replace(key.encode(), key.replace("split", "spilt").encode()))
    with pytest.raises(ModelFileError, match=found):
        Llama(str(parts[0]), **SMALL)
