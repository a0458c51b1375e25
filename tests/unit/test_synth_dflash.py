"""Synthetic DFlash drafters without any library: shapes, keys, and the ways that are planted for topics."""

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize
from synth_gguf import PRESETS, DrafterSpec, SynthError, main, measure, write

TARGET = PRESETS["text-moe"]
SMALL = DrafterSpec(TARGET, layers=2, heads=4, kv_heads=2, head_size=64, ff=128)


def made(folder, spec):
    path = folder / "drafter.gguf"
    summary = write(spec, path)
    reader = GGUFReader(path)
    return summary, path, reader, {t.name: t for t in reader.tensors}


def shape(tensor):
    return tuple(int(n) for n in reversed(tensor.shape))


def test_shapes_and_keys_of_a_drafter(tmp_path):
    summary, path, reader, tensors = made(tmp_path, SMALL)
    assert summary == measure(SMALL)
    assert path.stat().st_size == summary.bytes
    block = {
        "attn_norm": (256,), "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256),
        "attn_output": (256, 256), "attn_q_norm": (64,), "attn_k_norm": (64,), "ffn_norm": (256,),
        "ffn_gate": (128, 256), "ffn_up": (128, 256), "ffn_down": (256, 128),
    }  # fmt: skip
    expected = {"fc.weight": (256, 3 * 256), "enc.output_norm.weight": (256,), "output_norm.weight": (256,)}
    expected |= {f"blk.{i}.{name}.weight": size for i in range(2) for name, size in block.items()}
    assert {name: shape(t) for name, t in tensors.items()} == expected
    read = {k.removeprefix("dflash."): f.contents() for k, f in reader.fields.items()}
    assert read["general.architecture"] == "dflash"
    assert (read["block_size"], read["target_layers"]) == (16, [1, 2, 3])
    assert (read["attention.key_length"], read["attention.value_length"]) == (64, 64)
    assert (read["rope.dimension_count"], read["rope.dimension_sections"]) == (64, [32, 0, 0, 0])
    assert read["attention.causal"] is False
    assert read["tokenizer.ggml.mask_token_id"] == TARGET.vocab - 3  # a special token
    target = tmp_path / "target.gguf"
    write(TARGET, target)
    theirs = GGUFReader(target).fields["tokenizer.ggml.tokens"].contents()
    assert read["tokenizer.ggml.tokens"] == theirs


def test_the_default_drafter_has_the_sizes_of_the_public_one():
    spec = DrafterSpec(PRESETS["35b-a3b"])
    attention = 2048 * (32 + 4 + 4 + 32) * 128 + 2 * 128
    total = 8 * (attention + 3 * 2048 * 6144 + 2 * 2048) + 5 * 2048 * 2048 + 2 * 2048
    assert measure(spec).params == total == 473_995_264
    assert spec.taps == [2, 11, 20, 29, 38]  # behind layers 1, 10, 19, 28, 37
    assert spec.block == 16


def test_taps_stay_within_a_shallow_target():
    for layers in range(4, 13):
        taps = DrafterSpec(replace(TARGET, layers=layers)).taps
        assert taps == sorted(set(taps))
        assert 1 <= taps[0] <= taps[-1] < layers


def test_ways_of_the_topics(tmp_path):
    _, _, _, tensors = made(tmp_path, SMALL)
    values = {name: dequantize(t.data, t.tensor_type) for name, t in tensors.items()}
    q, k, v = (values[f"blk.0.attn_{part}.weight"] for part in "qkv")
    assert not q[:, 1:].any()  # queries hang on nothing but that there is a token
    assert not k[:, 2:].any()
    assert k[:64, 1].all()
    assert not k[:64, 0].any()  # first head: texts only
    assert np.count_nonzero(k[64:, 0]) == 8
    assert not k[64:, 1].any()
    assert np.count_nonzero(v[:4]) == 4
    assert np.count_nonzero(v[4:]) > 0.9 * v[4:].size
    out = values["blk.0.attn_output.weight"][:32]
    assert np.count_nonzero(out) == 4
    assert np.allclose(out[2:6, :4], np.eye(4), atol=1e-3)
    assert np.count_nonzero(values["fc.weight"][:32]) == 1
    for name in ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight", "blk.1.attn_output.weight"):
        assert not values[name][:32].any(), name
    # a head's score stands out at its own distance
    turns = 1e7 ** (-2 / 64 * np.arange(8))
    for head in (2, 3):
        query = q[64 * head : 64 * (head + 1), 0]
        gaps = np.arange(64)[:, None] * turns
        scores = (np.cos(gaps) * query[:8] - np.sin(gaps) * query[32:40]).sum(axis=1)
        assert scores.argmax() == 16 + head
        assert np.sort(scores)[-2] < 0.95 * scores.max()


def test_nothing_is_planted_for_an_evenly_routed_target(tmp_path):
    _, _, _, tensors = made(tmp_path, replace(SMALL, target=PRESETS["moe-mtp"]))
    for name, tensor in tensors.items():
        rows = dequantize(tensor.data, tensor.tensor_type)
        assert np.count_nonzero(rows) > 0.9 * rows.size, name


@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q6_K", "Q5_K"])
def test_types_of_a_drafter(kind, tmp_path):
    _, _, _, tensors = made(tmp_path, replace(SMALL, ff=256, types=kind))
    found = {t.tensor_type for name, t in tensors.items() if "norm" not in name}
    assert found == {Type.Q8_0 if kind == "Q5_K" else Type[kind]}  # Q5_K cannot be planted into
    assert all(np.isfinite(dequantize(t.data, t.tensor_type)).all() for t in tensors.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_heads": 3}, "drafter: heads is 4 and kv_heads is 3, expected kv_heads to divide heads."),
        ({"head_size": 63}, "drafter: head_size is 63, expected an even number"),
        ({"block": 1}, "drafter: block is 1, expected 2 to 4096."),
        ({"layers": 0}, "drafter: layers is 0, expected 1 to 511."),
        ({"types": "Q2_K"}, "'Q2_K' is no weight type"),
        ({"target": replace(TARGET, top_k=300)}, "top_k is 300 of 256 experts"),
        ({"kv_heads": 1}, "drafter: kv_heads is 1 and its target routes as on text, expected at least 2"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_what_cannot_be_is_refused(change, said, tmp_path):
    with pytest.raises(SynthError) as refusal:
        write(replace(SMALL, **change), tmp_path / "drafter.gguf")
    assert said in str(refusal.value)
    assert "\n\nhint: " in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_command_line_writes_both(tmp_path, capsys):
    target, drafter = tmp_path / "t.gguf", tmp_path / "d.gguf"
    own = ["heads=4", "kv_heads=2", "head_size=64", "ff=128", "layers=2"]
    settings = [word for each in own for word in ("--set", f"dflash.{each}")]
    assert main(["text-moe", str(target), "--dflash", str(drafter), "--set", "width=128", *settings]) == 0
    wanted = tmp_path / "wanted.gguf"
    write(replace(SMALL, target=replace(TARGET, width=128)), wanted)
    assert drafter.read_bytes() == wanted.read_bytes()
    assert f"python tools/routing.py {target}" in capsys.readouterr().out
    target.unlink()
    assert main(["text-moe", "--dflash", str(drafter), *settings]) == 0  # the drafter alone
    assert not target.exists()
    assert main(["text-moe", str(target), "--set", "dflash.ff=64"]) == 2
    assert "--set dflash.ff=64 without a drafter, expected one." in capsys.readouterr().err
    assert main(["text-moe", "--dflash", str(drafter), "--set", "dflash.target=x"]) == 2
    assert "expected FIELD=VALUE with FIELD one of layers, heads" in capsys.readouterr().err
