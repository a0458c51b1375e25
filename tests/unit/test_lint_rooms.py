"""tools/lint_rooms.py passes on the tree and finds an arrow back, an unknown room and a stale table."""

from __future__ import annotations

import shutil
from pathlib import Path

import lint_rooms
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("src", "python/draftwood", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n")


def said(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert lint_rooms.main([str(root)]) == 1
    return capsys.readouterr().out


def test_the_tree_keeps_to_its_rooms(capsys):
    assert lint_rooms.main([]) == 0
    assert "found" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "line", "arrow"),
    [
        ("src/tree/build.h", '#include "round/engine.h"', "tree -> round"),
        ("src/llama/batch.h", '#  include "verify/tree_state.h"', "llama -> verify"),
        ("src/ops/top-rows/top-rows.cu", '#include "llama-context.h"', "ops -> llama.cpp"),
        ("src/tree/build.cpp", '#include "draftwood.h"', "tree -> include"),
        ("src/round/session.cpp", '#include "draftwood-testing.h"', "round -> draftwood-testing.h"),
        ("python/draftwood/load/files.py", "from draftwood.api.chat import chat", "load -> api"),
        ("python/draftwood/engine/tree.py", "import draftwood.generate.turns as t", "engine -> generate"),
        ("python/draftwood/engine/tree.py", "if 1:\n from draftwood import Llama", "engine -> draftwood"),
        ("python/draftwood/options.py", "from draftwood.engine import _capi", "shared -> engine"),
        ("python/draftwood/load/files.py", "from draftwood import cli", "load -> cli"),
    ],
)
def test_an_arrow_back_is_found(copy, capsys, file, line, arrow):
    append(copy / file, line)
    assert arrow in said(copy, capsys)


def test_a_new_room_needs_a_row(copy, capsys):
    (copy / "src/attic").mkdir()
    (copy / "src/attic/box.h").write_text("")
    (copy / "python/draftwood/box.py").write_text("")
    assert said(copy, capsys).count("found in no room") == 2


def test_a_stale_table_is_found_and_written(copy, capsys):
    layout = copy / "docs/layout.md"
    text = layout.read_text()
    layout.write_text(text.replace("MTP, DFlash", "MTP"))
    assert "the table is stale" in said(copy, capsys)
    assert lint_rooms.main(["--write", str(copy)]) == 0
    assert layout.read_text() == text
