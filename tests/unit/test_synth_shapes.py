"""Synthetic GGUFs without any library: what is written is read back with gguf.GGUFReader and compared."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize
from synth import blocks
from synth.vocab import builtin, byte_letters
from synth_gguf import PRESETS, SynthError, SynthSpec, changed, main, measure, write

SMALL = [name for name in PRESETS if not name.startswith("35b-a3b")]
FALL_BACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0, Type.IQ4_XS: Type.IQ4_NL}


def made(folder, spec):
    """Write `spec`; return its summary, path, reader, and its tensors by name."""
    path = folder / "model.gguf"
    summary = write(spec, path)
    reader = GGUFReader(path)
    return summary, path, reader, {t.name: t for t in reader.tensors}


def shape(tensor):
    return tuple(int(n) for n in reversed(tensor.shape))


def values(tensor):
    return dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("name", SMALL)
def test_preset_is_small_and_counted_exactly(name, tmp_path):
    spec = PRESETS[name]
    summary, path, reader, tensors = made(tmp_path, spec)
    assert summary == measure(spec)
    assert summary.bytes == path.stat().st_size < 30e6
    assert summary.tensors == len(tensors)
    assert summary.params == sum(int(t.n_elements) for t in reader.tensors)
    assert reader.fields[f"{spec.arch}.block_count"].contents() == spec.layers + spec.mtp
    assert all(np.isfinite(values(t)).all() for t in reader.tensors)
    assert list(tmp_path.iterdir()) == [path]  # nothing left over


def test_presets_cover_what_they_promise():
    has = {
        field: {getattr(PRESETS[name], field) for name in SMALL} for field in SynthSpec.__dataclass_fields__
    }
    for field in ("arch", "mtp", "tied", "merged_experts", "nextn_norm", "nextn_embed", "nextn_head"):
        assert len(has[field]) == 2, field
    for field in ("head_size", "state_size", "top_k", "attention_interval", "conv", "planted", "width"):
        assert len(has[field]) >= 2, field
    assert {PRESETS[n].value_heads // PRESETS[n].key_heads for n in SMALL} >= {2, 3, 4, 8}
    assert {PRESETS[n].heads // PRESETS[n].kv_heads for n in SMALL} >= {2, 4, 8}


def test_shapes_of_a_mixture_with_mtp(tmp_path):
    _, _, _, tensors = made(tmp_path, PRESETS["moe-mtp"])
    delta = {
        "attn_qkv.weight": (512, 256), "attn_gate.weight": (256, 256), "ssm_conv1d.weight": (512, 4),
        "ssm_dt.bias": (4,), "ssm_a": (4,), "ssm_beta.weight": (4, 256), "ssm_alpha.weight": (4, 256),
        "ssm_norm.weight": (64,), "ssm_out.weight": (256, 256),
    }  # fmt: skip
    attention = {
        "attn_q.weight": (512, 256), "attn_k.weight": (128, 256), "attn_v.weight": (128, 256),
        "attn_output.weight": (256, 256), "attn_q_norm.weight": (64,), "attn_k_norm.weight": (64,),
    }  # fmt: skip
    common = {
        "attn_norm.weight": (256,), "post_attention_norm.weight": (256,), "ffn_gate_inp.weight": (8, 256),
        "ffn_gate_exps.weight": (8, 64, 256), "ffn_up_exps.weight": (8, 64, 256),
        "ffn_down_exps.weight": (8, 256, 64), "ffn_gate_inp_shexp.weight": (256,),
        "ffn_gate_shexp.weight": (64, 256), "ffn_up_shexp.weight": (64, 256),
        "ffn_down_shexp.weight": (256, 64),
    }  # fmt: skip
    nextn = {
        "nextn.eh_proj.weight": (256, 512), "nextn.enorm.weight": (256,), "nextn.hnorm.weight": (256,),
        "nextn.shared_head_norm.weight": (256,),
    }  # fmt: skip
    expected = {"token_embd.weight": (384, 256), "output_norm.weight": (256,), "output.weight": (384, 256)}
    for block, kind in enumerate((delta, delta, delta, attention, attention | nextn)):
        expected |= {f"blk.{block}.{name}": size for name, size in (common | kind).items()}
    assert {name: shape(t) for name, t in tensors.items()} == expected


def test_optional_tensors_come_and_go(tmp_path):
    def names(**change):
        spec = replace(SynthSpec(layers=2, attention_interval=2), **change)
        return set(made(tmp_path, spec)[3])

    full = names()
    assert full - names(tied=True) == {"output.weight"}
    assert full - names(nextn_norm=False) == {"blk.2.nextn.shared_head_norm.weight"}
    assert names(nextn_embed=True) - full == {"blk.2.nextn.embed_tokens.weight"}
    assert names(nextn_head=True) - full == {"blk.2.nextn.shared_head_head.weight"}
    assert {n for n in full if n.startswith("blk.2.")} == full - names(mtp=False)
    merged = names(merged_experts=True)
    assert {n.split(".", 2)[2] for n in merged - full} == {"ffn_gate_up_exps.weight"}
    assert {n.split(".", 2)[2] for n in full - merged} == {"ffn_gate_exps.weight", "ffn_up_exps.weight"}
    dense = {n.split(".", 2)[2] for n in names(arch="qwen35") - full}
    assert dense == {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"}


def test_types_fall_back_where_rows_do_not_fit(tmp_path):
    _, _, _, odd = made(tmp_path, PRESETS["odd"])
    assert {t.tensor_type for t in odd.values()} == {Type.F16, Type.F32}  # rows of no multiple of 32
    _, _, _, mix = made(tmp_path, PRESETS["mix"])
    asked = {
        f"blk.{i}.ffn_down_exps.weight": kind for i, kind in enumerate((Type.Q5_K, Type.IQ4_XS, Type.Q6_K))
    }
    asked["blk.3.ffn_down_exps.weight"] = Type.Q4_K
    for name, kind in asked.items():
        assert shape(mix[name])[-1] == 288
        assert mix[name].tensor_type == FALL_BACK[kind], name
    assert mix["blk.3.attn_v.weight"].tensor_type == Type.Q6_K
    assert mix["blk.3.attn_q.weight"].tensor_type == Type.Q5_K
    assert mix["output.weight"].tensor_type == Type.F32
    small = [
        t for n, t in mix.items() if "norm" in n or "ssm_conv1d" in n or "gate_inp" in n or "ssm_a" in n[-5:]
    ]
    assert {t.tensor_type for t in small} == {Type.F32}


@pytest.mark.parametrize("kind", [*blocks.FLOATS, *blocks.RANDOM], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [512, blocks.OWN_BLOCKS + 1], ids=["own", "pool"])
def test_every_type_is_centred_and_spread_as_asked(kind, rows):
    drawn = blocks.draw(kind, (rows, 256), 1, "any", mean=0.0, std=0.03)
    blocks.release()
    some = dequantize(drawn[-512:], kind)
    assert some.std() == pytest.approx(0.03, rel=0.03)
    assert abs(some.mean()) < 0.1 * 0.03
    assert len(np.unique(drawn.view(np.uint8).reshape(rows, -1)[:, :32], axis=0)) == rows


def test_same_spec_same_bytes_on_every_machine(tmp_path):
    spec = PRESETS["mix"]
    _, path, reader, _ = made(tmp_path, spec)
    again = tmp_path / "again.gguf"
    write(spec, again)
    assert again.read_bytes() == path.read_bytes()
    write(replace(spec, seed=1), again)
    assert again.read_bytes() != path.read_bytes()
    digest = hashlib.sha256()
    for tensor in sorted(reader.tensors, key=lambda t: t.name):
        digest.update(tensor.name.encode() + tensor.data.tobytes())
    assert digest.hexdigest() == "eb146f39b8ea49fc3097a737817947b4a8df322c91e0d93deb8d1b0ea1cf2c2b"


def test_35b_a3b_has_the_sizes_of_the_real_model():
    spec = PRESETS["35b-a3b"]
    moe = 256 * 3 * 512 * 2048 + 3 * 512 * 2048 + (256 + 1) * 2048 + 2 * 2048
    attention = 2048 * (2 * 16 + 2 * 2 + 16) * 256 + 2 * 256
    delta = 2048 * (8192 + 4096 + 4096 + 2 * 32) + 8192 * 4 + 2 * 32 + 128
    nextn = 2048 * 2 * 2048 + 3 * 2048
    total = 2 * 248320 * 2048 + 2048 + 41 * moe + 11 * attention + 30 * delta + nextn
    size = measure(spec)
    assert size.params == total == 35_505_251_456
    assert size.bytes / 2**30 == pytest.approx(20.1, abs=0.05)
    # four blocks more cost the same anywhere in the model
    at = {n: measure(replace(spec, layers=n, vocab=1000)).bytes for n in (8, 12, 36, 40)}
    assert at[12] - at[8] == pytest.approx(at[40] - at[36], abs=20_000)  # names of tensors get longer


def test_35b_a3b_with_fewer_blocks_experts_and_tokens_is_written_as_counted(tmp_path):
    spec = replace(PRESETS["35b-a3b"], layers=4, experts=16, vocab=1000)
    summary, path, reader, tensors = made(tmp_path, spec)
    assert summary == measure(spec)
    assert path.stat().st_size == summary.bytes
    kinds = {name: (shape(t), t.tensor_type) for name, t in tensors.items()}
    assert kinds["blk.1.ffn_down_exps.weight"] == ((16, 2048, 512), Type.Q6_K)
    assert kinds["blk.2.ffn_down_exps.weight"] == ((16, 2048, 512), Type.Q4_K)
    assert kinds["blk.3.attn_q.weight"] == ((8192, 2048), Type.Q4_K)
    assert kinds["blk.0.attn_qkv.weight"] == ((8192, 2048), Type.Q4_K)
    assert kinds["blk.4.nextn.eh_proj.weight"] == ((2048, 4096), Type.Q8_0)
    assert reader.fields["qwen35moe.rope.dimension_count"].contents() == 64
    assert reader.fields["qwen35moe.rope.dimension_sections"].contents() == [11, 11, 10, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arch": "llama"}, "arch is 'llama', expected qwen35moe or qwen35."),
        ({"width": 0}, "width is 0, expected 8 to 65536."),
        ({"width": 64.5}, "width is 64.5, expected a value of type int."),
        ({"kv_heads": 3}, "heads is 4 and kv_heads is 3, expected kv_heads to divide heads."),
        ({"key_heads": 3}, "value_heads is 4 and key_heads is 3, expected key_heads to divide value_heads."),
        ({"head_size": 63}, "head_size is 63, expected an even number"),
        ({"rope_dims": 66}, "rope_dims is 66 and head_size is 64, expected rope_dims at most head_size."),
        ({"top_k": 9}, "top_k is 9 of 8 experts, expected top_k at most experts."),
        ({"experts": 1025}, "experts is 1025, expected 1 to 1024."),
        ({"conv": 1}, "conv is 1, expected 2 to 32."),
        ({"layers": 3}, "attention_interval is 4 with 3 layers, expected an attention block among them"),
        ({"attention_interval": 1}, "attention_interval is 1, expected 2 to 511."),
        ({"layers": 512}, "layers is 512, expected 2 to 511."),
        ({"mtp": False, "nextn_head": True}, "nextn_head is set without an MTP block, expected mtp"),
        ({"arch": "qwen35", "merged_experts": True}, "merged_experts is set for a dense model, expected"),
        ({"planted": float("nan")}, "planted is nan, expected 0, or 0.05 to 1."),
        ({"planted": 0.5, "tied": True}, "planted is set for a tied model, expected a head of its own"),
        ({"vocab": 259}, "vocab is 259, expected at least 260"),
        ({"types": "Q2_K"}, "'Q2_K' is no weight type, expected one of F32, F16, BF16"),
        ({"types": "*=F16,output.weight=Q8_0"}, "leaves out the other tensors, expected a type without"),
        ({"vocab_file": "none.gguf"}, "'none.gguf' is not a file, expected a GGUF."),
        ({"vocab_file": __file__}, "cannot be read"),
        ({"layers": 511, "attention_interval": 511, "experts": 1024, "expert_ff": 1 << 20}, "GiB are free"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_what_the_pin_cannot_load_is_refused_before_a_file_exists(change, said, tmp_path):
    with pytest.raises(SynthError) as refusal:
        write(replace(SynthSpec(), **change), tmp_path / "model.gguf")
    assert said in str(refusal.value)
    assert ", expected " in str(refusal.value)
    assert "\n\nhint: " in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SynthError, match="is no folder, expected one to write into"):
        write(SynthSpec(), tmp_path / "none" / "model.gguf")


def test_builtin_vocabulary_is_bytes_merges_specials(tmp_path):
    _, _, reader, tensors = made(tmp_path, PRESETS["moe-plain"])
    read = {k.removeprefix("tokenizer.ggml."): f.contents() for k, f in reader.fields.items()}
    tokens = read["tokens"]
    assert len(tokens) == len(set(tokens)) == 384
    assert tokens[:256] == byte_letters()
    assert tokens[ord("A")] == "A"
    assert tokens[-3:] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert read["token_type"] == [1] * 381 + [3] * 3
    assert (read["model"], read["pre"], read["eos_token_id"]) == ("gpt2", "qwen35", 383)
    assert [merge.replace(" ", "") for merge in read["merges"]] == tokens[256:381]
    for name in ("token_embd.weight", "output.weight"):  # so that random text does not hit them
        loud = values(tensors[name]).std(axis=1)
        assert loud[-3:].max() < 0.2 * loud[:-3].min()


def test_large_builtin_vocabulary_has_no_token_twice():
    pairs = {key: value for key, value, *_ in builtin(150_000).pairs}
    assert len(set(pairs["tokenizer.ggml.tokens"])) == 150_000


def test_vocabulary_is_copied_and_padded(tmp_path):
    source = tmp_path / "source.gguf"
    write(replace(PRESETS["moe-plain"], vocab=300), source)
    _, _, reader, tensors = made(tmp_path, replace(PRESETS["q8"], vocab_file=str(source), vocab=320))
    theirs = GGUFReader(source).fields
    for key, field in theirs.items():
        if key.startswith("tokenizer.") and not key.endswith((".tokens", ".token_type")):
            assert reader.fields[key].contents() == field.contents(), key
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:300] == theirs["tokenizer.ggml.tokens"].contents()
    assert tokens[300:] == [f"[PAD{i}]" for i in range(20)]
    assert reader.fields["tokenizer.ggml.token_type"].contents()[297:] == [3] * 3 + [5] * 20
    assert shape(tensors["token_embd.weight"]) == (320, 256)
    loud = values(tensors["token_embd.weight"]).std(axis=1)
    assert loud[297:].max() < 0.2 * loud[:297].min()


def test_planted_head_answers_each_token_with_two_others(tmp_path):
    spec = SynthSpec(planted=0.5, nextn_head=True, nextn_embed=True, types="Q4_K")
    _, _, _, tensors = made(tmp_path, spec)
    embedding, head = (values(tensors[f"{n}.weight"])[:381] for n in ("token_embd", "output"))
    logits = embedding @ head.T
    first, second = np.argsort(-logits, axis=1)[:, :2].T
    assert len(set(first)) > 250  # of 381 for a ring; chance makes some second ones first
    assert not (first == np.arange(381)).any()
    assert (np.take_along_axis(logits, second[:, None], 1)[:, 0] > 3 * logits.std(axis=1)).mean() > 0.8
    joint = values(tensors["blk.4.nextn.eh_proj.weight"])
    assert np.allclose(joint[:, :256], np.eye(256), atol=1e-3)
    assert 0 < joint[:, 256:].std() < 0.1
    own = "blk.4.nextn.embed_tokens.weight", "blk.4.nextn.shared_head_head.weight"
    for copy, original in zip(own, ("token_embd.weight", "output.weight"), strict=True):
        assert np.array_equal(tensors[copy].data, tensors[original].data)


def test_command_line_writes_what_is_asked(tmp_path, capsys):
    out = tmp_path / "model.gguf"
    assert (
        main(["moe-mtp", str(out), "--layers", "6", "--seed", "3", "--set", "width=128", "--set", "mtp=no"])
        == 0
    )
    wanted = tmp_path / "wanted.gguf"
    write(SynthSpec(layers=6, seed=3, width=128, mtp=False), wanted)
    assert out.read_bytes() == wanted.read_bytes()
    assert "MB" in capsys.readouterr().out
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["defaults", *PRESETS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["moe", "x.gguf"], "preset is 'moe', expected one of moe-mtp"),
        ([], "preset is None, expected one of"),
        (["moe-mtp"], "no file to write is named, expected one."),
        (
            ["moe-mtp", "x.gguf", "--set", "depth=3"],
            "--set 'depth=3', expected FIELD=VALUE with FIELD one of",
        ),
        (["moe-mtp", "x.gguf", "--set", "width=wide"], "--set 'width=wide', expected a value of type int."),
        (["moe-mtp", "x.gguf", "--set", "mtp=maybe"], "--set 'mtp=maybe', expected a value of type bool."),
        (["moe-mtp", "x.gguf", "--layers", "2"], "attention_interval is 4 with 2 layers"),
    ],
)
def test_command_line_refuses_in_words(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("synth_gguf: ")
    assert said in error
    assert "\n\nhint: " in error
    assert not list(tmp_path.iterdir())


def test_settings_take_the_type_of_their_field():
    spec = changed(SynthSpec(), ["planted=0.25", "types=output.weight=Q6_K,Q4_K", "tied=true", "width=512"])
    assert spec == SynthSpec(planted=0.25, types="output.weight=Q6_K,Q4_K", tied=True, width=512)
