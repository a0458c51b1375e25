"""Which parts of a file's layers `draftwood doctor` calls fused: the rules are those of the ops."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from draftwood.cli import fused
from draftwood.engine.engine import probe_model
from draftwood.errors import ModelFileError
from draftwood.load import header
from draftwood.load.header import Tensor

from tests.unit.model_of_experts import INFO

PARTS = Path(__file__).resolve().parents[2] / "src" / "ops" / "layer-parts"
HEADER = (PARTS / "layer-settings.h").read_text("utf-8")
MOE, DENSE = replace(INFO, n_layers=4), replace(INFO, n_layers=4, architecture="qwen35", n_experts=0)
DELTA_NET = [
    "attn_qkv",
    "attn_gate",
    "ssm_beta",
    "ssm_alpha",
    "ssm_out",
    "ssm_dt.bias",
    "ssm_a",
    "ssm_conv1d",
    "ssm_norm",
]
ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
ROUTERS = ["ffn_gate_inp", "ffn_gate_inp_shexp"]
SHARED = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]
EXPERTS = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", *SHARED, *ROUTERS]
OF_DENSE = ["ffn_gate", "ffn_up", "ffn_down"]
NORMS = ["attn_norm", "post_attention_norm"]
F32 = {
    *NORMS,
    *ROUTERS,
    "output_norm",
    "ssm_dt.bias",
    "ssm_a",
    "ssm_conv1d",
    "ssm_norm",
    "attn_q_norm",
    "attn_k_norm",
    "nextn.enorm",
    "nextn.hnorm",
}
ROWS = {"ssm_conv1d": 4, "ssm_norm": 128, "attn_q_norm": 256}
TYPES = f"fused products take {', '.join(fused.PRODUCT_TYPES)}"


def model(is_moe: bool, **changes: Any) -> dict[str, Tensor]:
    """Return 4 layers, the last of attention, and the beginning of an MTP block.

    changes: a type, or the values of a row, by a tensor's name with "__" for ".".
    """
    names = ["output", "output_norm", "token_embd", "blk.4.attn_q"]
    names += [f"blk.4.nextn.{name}" for name in ("eh_proj", "enorm", "hnorm")]
    for i in range(4):
        own = [*(ATTENTION if i == 3 else DELTA_NET), *(EXPERTS if is_moe else OF_DENSE), *NORMS]
        names += [f"blk.{i}.{name}" for name in own]
    return {name: _tensor(name, changes) for name in names}


def _tensor(name: str, changes: dict[str, Any]) -> Tensor:
    short = re.sub(r"^blk\.\d+\.", "", name)
    kind, row = "F32" if short in F32 else "Q4_K", ROWS.get(short, 2048)
    for key, to in changes.items():
        if key.replace("__", ".") in (name, short):
            kind, row = (to, row) if isinstance(to, str) else (kind, to)
    return Tensor(kind, (row, 1, 1, 1))


def declined(tensors: dict[str, Tensor], info: Any = MOE) -> dict[str, tuple[list[int], str]]:
    return {each["part"]: (each["layers"], each["reason"]) for each in fused.told(tensors, info)["declined"]}


def number(name: str, text: str = HEADER) -> int:
    found = re.search(rf"\b{name}\s*=\s*(\d+);", text)
    assert found, name
    return int(found[1])


def test_the_rules_are_those_of_the_ops():
    for name, types in (("direct_types", fused.DIRECT_TYPES), ("byte_tiled_types", fused.BYTE_TILED_TYPES)):
        listed = re.search(name + r"\[\] = \{(.*?)\}", HEADER, re.DOTALL)
        assert listed
        assert tuple(re.findall(r"GGML_TYPE_(\w+)", listed[1])) == types
    assert number("byte_tile") == fused.BYTE_TILE
    body = re.search(r"bool is_float\(ggml_type type\) \{(.*?)\}", HEADER, re.DOTALL)
    assert body
    assert tuple(re.findall(r"GGML_TYPE_(\w+)", body[1])) == fused.FLOATS
    limits = (number("max_width"), number("max_experts"), number("max_used"))
    assert limits == (fused.MAX_WIDTH, fused.MAX_EXPERTS, fused.MAX_USED)
    body = re.search(r"bool is_attention_size\(int64_t size\) \{(.*?)\}", HEADER, re.DOTALL)
    assert body
    assert tuple(map(int, re.findall(r"size == (\d+)", body[1]))) == fused.HEAD_SIZES
    step = (PARTS / "delta-step.cu").read_text("utf-8")
    assert tuple(map(int, re.findall(r"v->ne\[0\] == (\d+)", step))) == fused.STATE_SIZES
    heads = (PARTS / "delta-heads.cu").read_text("utf-8")
    assert (number("chain_width", heads), number("max_size", heads)) == (*fused.TAPS, fused.MAX_HEAD)


@pytest.mark.parametrize("is_moe", [True, False], ids=["experts", "dense"])
def test_a_model_of_which_all_is_fused(is_moe):
    found = fused.told(model(is_moe), MOE if is_moe else DENSE)
    assert found == {"layers": 4, "declined": [], "reason": ""}
    heads = "attention heads: only with flash attention and a KV cache of F16, F32 or Q8_0"
    heads += "; attention: of F16 or Q8_0"
    assert fused.lines(found) == ["all 4 (on a CUDA card)", heads]


@pytest.mark.parametrize("kind", fused.PRODUCT_TYPES)
def test_types_that_are_fused(kind):
    weights = (
        "attn_qkv",
        "ssm_beta",
        "ssm_out",
        "attn_v",
        "attn_output",
        "ffn_down_exps",
        "ffn_down_shexp",
        "output",
    )
    assert not declined(model(True, **dict.fromkeys(weights, kind)))


@pytest.mark.parametrize(
    ("changes", "part", "layers", "reason"),
    [
        ({"blk__1__ffn_down_exps": "Q2_K"}, "experts", [1], f"ffn_down_exps is Q2_K; {TYPES}"),
        ({"ffn_down_shexp": "Q5_0"}, "experts", [0, 1, 2, 3], f"ffn_down_shexp is Q5_0; {TYPES}"),
        ({"blk__2__ffn_up_exps": "Q6_K"}, "experts", [2],
         "ffn_gate_exps is Q4_K and ffn_up_exps is Q6_K; expected one type"),
        ({"ffn_gate_inp": "Q8_0", "ffn_gate_inp_shexp": "Q8_0"}, "experts", [0, 1, 2, 3],
         "ffn_gate_inp_shexp is Q8_0; expected F32, F16, BF16"),
        ({"blk__0__ffn_gate_inp_shexp": "F16"}, "experts", [0],
         "ffn_gate_inp is F32 and ffn_gate_inp_shexp is F16; expected one type"),
        ({"ffn_down_exps": 720}, "experts", [0, 1, 2, 3],
         "rows of ffn_down_exps have 720 values; expected a multiple of 32"),
        ({"blk__0__ssm_alpha": "Q4_1"}, "delta inputs", [0], f"ssm_alpha is Q4_1; {TYPES}"),
        ({"ssm_conv1d": 3}, "delta front", [0, 1, 2], "rows of ssm_conv1d have 3 values; expected 4"),
        ({"ssm_norm": 16}, "delta step", [0, 1, 2], "rows of ssm_norm have 16 values; expected 32, 64, 128"),
        ({"ssm_out": "Q2_K"}, "delta output", [0, 1, 2], f"ssm_out is Q2_K; {TYPES}"),
        ({"attn_k": "IQ1_S"}, "attention inputs", [3], f"attn_k is IQ1_S; {TYPES}"),
        ({"attn_output": "Q5_1"}, "attention output", [3], f"attn_output is Q5_1; {TYPES}"),
        ({"blk__1__attn_norm": "F16"}, "delta inputs", [1], "attn_norm is F16; expected F32"),
        ({"attn_norm": 20480}, "attention inputs", [3],
         "rows of attn_norm have 20480 values; expected a multiple of 32, 16384 at most"),
        ({"ssm_norm": 512}, "delta front", [0, 1, 2],
         "rows of ssm_norm have 512 values; expected a multiple of 32, 256 at most"),
        ({"attn_q_norm": 512}, "attention heads", [3],
         "rows of attn_q_norm have 512 values; expected 2 to 256"),
        ({"nextn.eh_proj": "Q4_1"}, "draft input", [4], f"nextn.eh_proj is Q4_1; {TYPES}"),
        ({"nextn.hnorm": 8224}, "draft input", [4],
         "rows of nextn.hnorm have 8224 values; expected a multiple of 32, 8192 at most"),
        ({"attn_q_norm": 96}, "flash attention", [3],
         "rows of attn_q_norm have 96 values; expected 64, 128, 256"),
        ({"attn_norm": 2000}, "delta output", [0, 1, 2],
         "rows of attn_norm have 2000 values; expected a multiple of 32"),
        ({"attn_norm": 2000}, "attention output", [3],
         "rows of attn_norm have 2000 values; expected a multiple of 32"),
        ({"output": "Q2_K"}, "output head", [], f"output is Q2_K; {TYPES}"),
        ({"output_norm": "F16"}, "output norm", [], "output_norm is F16; expected F32"),
    ],
)  # fmt: skip
def test_what_is_not_fused_and_why(changes, part, layers, reason):
    assert declined(model(True, **changes))[part] == (layers, reason)


def test_types_that_become_bytes_have_rows_of_whole_tiles():
    tensors = model(True, blk__1__ffn_down_exps="MXFP4")
    assert not declined(tensors)
    tensors["blk.1.ffn_down_exps"] = Tensor("MXFP4", (736, 1, 1, 1))
    reason = "rows of ffn_down_exps have 736 values; expected a multiple of 256 for MXFP4"
    assert declined(tensors) == {"experts": ([1], reason)}


def test_other_parts_of_such_a_layer_are():
    assert set(declined(model(True, ssm_norm=256))) == {"delta step"}
    assert set(declined(model(True, output_norm="F16"))) == {"output norm"}
    assert set(declined(model(True, attn_q_norm="F16"))) == {"attention heads"}
    assert set(declined(model(True, blk__1__ffn_down_exps="Q2_K"))) == {"experts"}
    assert set(declined(model(False, ffn_up="Q5_K"), DENSE)) == {"feed forward"}


def test_merged_experts_tied_heads_and_missing_tensors():
    tensors = model(True)
    for i in range(4):
        tensors[f"blk.{i}.ffn_gate_up_exps"] = tensors.pop(f"blk.{i}.ffn_gate_exps")
        del tensors[f"blk.{i}.ffn_up_exps"]
    del tensors["output"]
    assert not declined(tensors)
    tensors["blk.0.ffn_gate_up_exps"] = tensors["token_embd"] = Tensor("Q2_K", (2048, 1, 1, 1))
    assert declined(tensors)["experts"] == ([0], f"ffn_gate_up_exps is Q2_K; {TYPES}")
    assert declined(tensors)["output head"] == ([], f"token_embd is Q2_K; {TYPES}")
    del tensors["blk.3.attn_q"]
    assert declined(tensors)["attention inputs"] == ([3], "the file has no attn_q")


def test_numbers_of_experts():
    found = declined(model(True), replace(MOE, n_experts=1024))
    assert found == {"experts": ([0, 1, 2, 3], "there are 1024; expected 512 at most")}
    found = declined(model(True), replace(MOE, n_experts_used=32))
    assert found == {"experts": ([0, 1, 2, 3], "a token has 32; expected 16 at most")}


def test_layers_with_one_reason_share_a_line():
    changes = {f"blk__{i}__ffn_down_exps": "Q2_K" for i in (0, 1, 3)}
    assert fused.lines(fused.told(model(True, output="Q2_K", **changes), MOE)) == [
        "1 of 4 (on a CUDA card); llama.cpp computes these parts:",
        f"output head: output is Q2_K; {TYPES}",
        f"experts of layers 0-1, 3: ffn_down_exps is Q2_K; {TYPES}",
        "hint: for speed, llama-quantize --tensor-type '^output[.]weight=TYPE' "
        "--tensor-type '[.]ffn_down_exps[.]weight=TYPE' on the F16 file; the text is right either way",
    ]
    for changes, reason in (  # llama-quantize does not mend these
        ({"blk__2__ssm_conv1d": 3}, "delta front of layer 2: rows of ssm_conv1d have 3 values; expected 4"),
        (
            {"blk__2__ffn_gate_inp_shexp": "F16"},
            "experts of layer 2: ffn_gate_inp is F32 and ffn_gate_inp_shexp is F16; expected one type",
        ),
    ):
        (_, line) = fused.lines(fused.told(model(True, **changes), MOE))
        assert line == reason


def test_a_header_of_many_tensors_takes_no_time():
    tensors = {**model(True), **{f"blk.{i}.x{i}": Tensor("F32", (32, 1, 1, 1)) for i in range(200_000)}}
    begin = time.process_time()
    fused.told(tensors, replace(MOE, n_layers=512))
    assert time.process_time() - begin < 2.0


def test_what_a_header_does_not_tell():
    (line,) = fused.lines(fused.told(model(True), replace(MOE, architecture="llama")))
    assert line.startswith("not told for architecture 'llama'; speculation_stats.fused_parts")


def test_a_file_that_is_gone_by_then(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    for name in ("none.gguf", "cut.gguf"):
        with pytest.raises(ModelFileError, match=name):
            header.tensors(str(tmp_path / name))


@pytest.mark.parametrize("n_files", [0, 1])
def test_a_file_that_was_merged(tmp_path, n_files):
    """llama-gguf-split --merge leaves a 0."""
    path = str(tmp_path / "whole.gguf")
    out = gguf.GGUFWriter(path, "qwen35")
    out.add_uint16("split.count", n_files)
    out.add_tensor("blk.0.ffn_up.weight", np.zeros((3, 64), np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    assert header.files(path) == [path]
    assert header.tensors(path) == {"blk.0.ffn_up": Tensor("F16", (64, 3, 1, 1))}
    assert probe_model(path).n_files == 1
