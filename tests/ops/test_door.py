"""src/ops/door: descriptors as the CPU backend has them, and nodes as the builder makes them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import source

from tests.ops import ggml_graph as ggml

ROOT = Path(__file__).resolve().parents[2]

OPERANDS = {
    "dw_tree_conv_windows": ["x", "states", "cells", "tree"],
    "dw_tree_delta_net": ["scratch", "q", "k", "v", "g", "beta", "states", "cells", "tree"],
    "dw_tree_commit_state": ["state", "factors", "path"],
    "dw_tree_commit_conv": ["state", "x", "path"],
    "dw_tree_scores": ["scores", "tree"],
    "dw_tree_values": ["values", "weights", "tree"],
    "dw_tree_commit_rows": ["cache", "moves"],
    "dw_tree_commit_columns": ["cache", "moves"],
    "dw_top_rows": ["logits", "tokens"],
}


@pytest.mark.parametrize("name", OPERANDS)
def test_a_descriptor_tells_name_and_operands(name):
    """It is static: found again at the same address. The CPU's has the reference and nothing of a device."""
    found = ggml.descriptor(name)
    assert found.name.decode() == name
    assert found.operand_names() == OPERANDS[name]
    assert found.cpu
    assert (found.takes, found.workspace, found.launch) == (None, None, None)
    assert ggml.symbol("CPU", name) == ctypes.addressof(found)


def test_other_names_are_none_of_ours():
    assert ggml.symbol("CPU", "dw_tree") is None
    assert ggml.symbol("CPU", "ggml_backend_set_n_threads")


def test_a_node_has_operands_layer_and_name(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    llama = source.ensure_source(ROOT).llama_cpp
    library = tmp_path / "door.so"
    folders = [ROOT / "src", llama / "ggml" / "include", llama / "ggml" / "src"]
    command = [compiler, "-std=c++17", "-fPIC", "-shared", "-w", *(f"-I{x}" for x in folders), "-o", library]
    base = ggml.folder / "libdraftwood-ggml-base.so"
    subprocess.run([*command, ROOT / "tests" / "ops" / "door.cpp", base], check=True)
    failure = ctypes.CDLL(str(library)).door_failure
    failure.restype, failure.argtypes = ctypes.c_char_p, [ctypes.c_void_p] * 2
    ours, another = (ggml.symbol("CPU", f"dw_tree_commit_{what}") for what in ("conv", "rows"))
    assert failure(ours, ours) is None
    assert failure(ours, another) is None
