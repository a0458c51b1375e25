"""Damaged headers end no process, and each failure is a draftwood error with what was found and a hint."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from draftwood import Llama, ModelFileError, UnsupportedError
from draftwood.engine.engine import probe_model
from synth_gguf import PRESETS, DrafterSpec, write

from tests.model import damaged_header
from tests.model.test_dflash import rewrite

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    **{"width": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "layers": 4},
    **{"state_size": 16, "key_heads": 1, "value_heads": 2},
}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ff": 32, "shared_ff": 32}
FILES = ("moe.gguf", "dense.gguf", "dflash.gguf")
TIMEOUT = 120  # seconds for one case


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A qwen35moe and a qwen35 with MTP blocks, and a DFlash drafter for the first."""
    made = tmp_path_factory.mktemp("whole")
    moe = replace(PRESETS["moe-mtp"], **SMALL, **EXPERTS)
    write(moe, made / FILES[0])
    write(replace(PRESETS["dense-mtp"], **SMALL, ff=64), made / FILES[1])
    write(DrafterSpec(moe, layers=2, heads=2, kv_heads=1, head_size=32, ff=64), made / FILES[2])
    return made


def tried(folder: Path, first: int, last: int) -> dict[int, str]:
    """Return what each case came to; a case that ends its process says how, and the next go on in another."""
    said: dict[int, str] = {}
    while first < last:
        script = str(Path(damaged_header.__file__))
        command = [sys.executable, script, str(first), str(last), *(str(folder / name) for name in FILES)]
        try:
            done = subprocess.run(
                [*command, str(folder)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=ROOT,
                timeout=TIMEOUT + 2 * (last - first),
            )
            output, end = done.stdout, f"ended with {done.returncode}: {done.stderr[-600:]}"
        except subprocess.TimeoutExpired as late:
            output, end = (late.stdout or b"").decode(), "hung"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        said |= {line["case"]: line["said"] for line in lines if "said" in line}
        begun = max((line["case"] for line in lines), default=first)
        if begun not in said:
            said[begun] = f"died: {end}"
        first = begun + 1
    return said


def check(said: dict[int, str], n: int) -> None:
    wrong = {case: words for case, words in said.items() if not words.startswith(("draftwood: ", "loaded"))}
    assert not wrong, "\n\n".join(f"case {case}: {words}" for case, words in sorted(wrong.items()))
    assert sorted(said) == list(range(n))
    refused = sum(words.startswith("draftwood: ") for words in said.values())
    assert n // 4 < refused < n


def test_some_damaged_headers(folder):
    check(tried(folder, 0, 150), 150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_damaged_headers(folder):
    with ThreadPoolExecutor(2) as workers:
        parts = workers.map(lambda first: tried(folder, first, first + 250), range(0, 2000, 250))
        check({case: words for part in parts for case, words in part.items()}, 2000)


# --- single fields -------------------------------------------------------------------------------------

NAN = float("nan")
TARGET_FIELDS = [
    ("block_count", 2**31, "block_count is 2147483648; expected 1 to 512"),
    ("block_count", 0, "block_count is 0; expected 1 to 512"),
    ("nextn_predict_layers", 2**32 - 1, "nextn_predict_layers is 4294967295; expected"),
    ("expert_used_count", 5, "expert_used_count is 5; expected 1 to 4 (expert_count)"),
    ("expert_used_count", 0, "expert_used_count is 0; expected 1 to 4"),
    ("expert_count", 0, "expert_count is 0; expected 1 to 1024"),
    ("expert_count", 5000, "expert_count is 5000; expected 1 to 1024"),
    ("full_attention_interval", 0, "full_attention_interval is 0; expected 1 to"),
    ("ssm.inner_size", 33, "ssm.inner_size is 33; expected 32, ssm.time_step_rank times ssm.state_size"),
    ("ssm.group_count", 0, "ssm.group_count is 0; expected 1 to 2 (ssm.time_step_rank)"),
    (
        "rope.dimension_sections",
        [9, 9, 9, 0],
        "is [9, 9, 9, 0]; expected none below 0, one of the first three",
    ),
    ("rope.dimension_sections", [9, 9, 9, 0], "above 0, together at most 4 pairs (rope.dimension_count)"),
    ("rope.dimension_sections", [-1, 3, 3, 0], "rope.dimension_sections is [-1, 3, 3, 0]; expected"),
    ("rope.dimension_sections", [0, 0, 0, 1], "rope.dimension_sections is [0, 0, 0, 1]; expected"),
    ("rope.dimension_sections", [0, 0, 0, 0], "rope.dimension_sections is [0, 0, 0, 0]; expected"),
    ("rope.dimension_count", 7, "rope.dimension_count is 7; expected a multiple of 2"),
    ("rope.freq_base", NAN, "rope.freq_base is nan; expected"),
    ("attention.layer_norm_rms_epsilon", NAN, "layer_norm_rms_epsilon is nan; expected 0 to 1"),
    ("attention.layer_norm_rms_epsilon", -1.0, "layer_norm_rms_epsilon is -1; expected 0 to 1"),
    ("attention.head_count_kv", 0, "head_count_kv is 0; expected 1 to 2 (attention.head_count)"),
    ("attention.value_length", 16, "value_length is 16; expected 32, attention.key_length"),
]


def changed(folder: Path, tmp_path: Path, name: str, key: str, value: object) -> Path:
    """Return a copy of a file of `folder` with the value of one field."""
    data = bytearray((folder / name).read_bytes())
    header = damaged_header.header_of(bytes(data))
    arch = {"moe.gguf": "qwen35moe", "dense.gguf": "qwen35", "dflash.gguf": "dflash"}[name]
    for place, found in zip(header.keys, header.values, strict=True):
        if data[place.at : place.at + place.size].decode() == f"{arch}.{key}":
            for element, new in zip(found, value if isinstance(value, list) else [value], strict=True):
                damaged_header.write_value(data, element, new)
            break
    else:
        raise KeyError(key)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("key", "value", "found"), TARGET_FIELDS, ids=lambda each: str(each)[:40])
def test_a_field_of_a_model(folder, tmp_path, key, value, found):
    path = changed(folder, tmp_path, "moe.gguf", key, value)
    with pytest.raises(ModelFileError) as caught:
        Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    assert found in caught.value.message
    assert f"{path}: " in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("value", [NAN, -1e-6, float("inf")])
def test_a_field_of_a_drafter(folder, tmp_path, value):
    path = changed(folder, tmp_path, "dflash.gguf", "attention.layer_norm_rms_epsilon", value)
    with pytest.raises(ModelFileError, match=r"layer_norm_rms_epsilon is .*; expected 0 to 1"):
        Llama(str(folder / "moe.gguf"), drafter=str(path), n_ctx=256, n_threads=1, verbose=False)


def rewritten(path: Path, out: Path, fields: dict[str, object], drop: tuple[str, ...] = ()) -> Path:
    """Write a copy of a file with these fields, of the types of their values, and without some others."""
    return rewrite(path, out, add_keys=fields, drop=(*fields, *drop))


def moe_of(folder: Path, tmp_path: Path, fields: dict[str, object], drop: tuple[str, ...] = ()) -> Llama:
    path = rewritten(folder / "moe.gguf", tmp_path / "rewritten.gguf", fields, drop)
    return Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)


HEADS = "qwen35moe.attention.head_count_kv"


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ([1, 1, 1, 1, 2], "is 1 for layer 0; expected one number for all layers, such as 2"),
        ([1, 0, 0, 0, 1], "is 0 for layer 3; expected one number for all layers, such as 1"),
        ([1, 0, 0, 1, 0], "is 0 for layer 4; expected one number"),
        (
            [True, False, False, False, True],
            "is of another type; expected a whole number, or one for each layer",
        ),
    ],
)
def test_heads_of_layers(folder, tmp_path, heads, found):
    """The graphs take one number, the cache each layer's own. Layers 0 to 2 have no attention."""
    with pytest.raises(ModelFileError) as caught:
        moe_of(folder, tmp_path, {HEADS: heads})
    assert f"{HEADS} {found}" in caught.value.message


@pytest.mark.parametrize("heads", [[1] * 5, [1, 0, 0, 1, 1]])
def test_heads_of_layers_that_fit(folder, tmp_path, heads):
    llm = moe_of(folder, tmp_path, {HEADS: heads})
    llm.create_completion("one two three", max_tokens=4)
    llm.close()
    keys = {"qwen35moe.expert_used_count": 1}  # checked on a copy of the header that has no tensors
    path = str(tmp_path / "rewritten.gguf")
    Llama(path, n_ctx=256, n_threads=1, verbose=False, kv_overrides=keys).close()


def test_sections_that_are_no_array(folder, tmp_path, monkeypatch):
    """llama.cpp takes one number of i32 for all four."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", gguf.GGUFWriter.add_int32)
    with pytest.raises(
        ModelFileError, match="dimension_sections is no array of 4 whole numbers; expected one"
    ):
        moe_of(folder, tmp_path, {"qwen35moe.rope.dimension_sections": 0})


@pytest.mark.parametrize(
    ("drop", "fields", "found"),
    [
        (
            ["attention.head_count"],
            {},
            "head_count_kv is 1; expected attention.head_count beside it, which is absent",
        ),
        (
            ["attention.head_count", "attention.head_count_kv", "attention.key_length"],
            {},
            "rope.dimension_count is 8; expected attention.key_length beside it, which is absent",
        ),
        (
            [
                "attention.head_count",
                "attention.head_count_kv",
                "attention.key_length",
                "rope.dimension_count",
            ],
            {},
            "value_length is 32; expected attention.key_length beside it, which is absent",
        ),
        (
            ["attention.key_length"],
            {"attention.value_length": 64},
            "value_length is 64; expected 32, embedding_length / attention.head_count",
        ),
        (
            ["attention.value_length"],
            {"attention.key_length": 64},
            "key_length is 64; expected 32, embedding_length / attention.head_count",
        ),
        (
            ["attention.key_length"],
            {"rope.dimension_count": 34},
            "rope.dimension_count is 34; expected 2 to 32 (embedding_length / attention.head_count)",
        ),
        (
            ["ssm.time_step_rank"],
            {},
            "ssm.group_count is 1; expected ssm.time_step_rank beside it, which is absent",
        ),
        (["ssm.state_size"], {}, "ssm.inner_size is 32; expected ssm.state_size beside it, which is absent"),
    ],
)
def test_a_field_whose_other_is_absent(folder, tmp_path, drop, fields, found):
    changes = {f"qwen35moe.{key}": value for key, value in fields.items()}
    with pytest.raises(ModelFileError) as caught:
        moe_of(folder, tmp_path, changes, tuple(f"qwen35moe.{key}" for key in drop))
    assert found in caught.value.message


def test_heads_whose_size_is_computed(folder, tmp_path):
    moe_of(
        folder, tmp_path, {}, ("qwen35moe.attention.key_length", "qwen35moe.attention.value_length")
    ).close()


# --- tokenizers ----------------------------------------------------------------------------------------

KIND, TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"


def byte_tokens(names: list[str]) -> dict[str, object]:
    """Return the fields of a vocabulary of 384 tokens whose second to 257th are bytes, by these names."""
    types = [gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * 127]
    texts = ["<s>", *names, *(f"t{i}" for i in range(127))]
    return {TOKENS: texts, "tokenizer.ggml.token_type": [int(each) for each in types]}


def spm(lacking: int | None = None) -> dict[str, object]:
    return {KIND: "llama", **byte_tokens([f"<0x{i:02X}>" if i != lacking else "none" for i in range(256)])}


def rwkv(lacking: int | None = None) -> dict[str, object]:
    return {KIND: "rwkv", **byte_tokens([f"\\x{i:02x}" + ("+" if i == lacking else "") for i in range(256)])}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({KIND: "none"}, f"{KIND} is 'none'; expected a tokenizer, such as gpt2 or llama"),
        ({KIND: "no_vocab"}, f"{KIND} is 'no_vocab'; expected a tokenizer"),
        ({KIND: "llama"}, f"{KIND} is 'llama' and {TOKENS} lacks <0x00>; expected a token for each byte"),
        (spm(0x7A), f"{TOKENS} lacks <0x7A>; expected a token for each byte"),
        (rwkv(0x7A), f"{TOKENS} lacks the byte 0x7a, with which some begin; expected a token"),
        (
            {KIND: "gemma4", "tokenizer.ggml.bos_token_id": 384},
            f"{KIND} is 'gemma4' and tokenizer.ggml.bos_token_id is 384; expected the number of a token",
        ),
    ],
)
def test_a_tokenizer_that_would_end_the_process(folder, tmp_path, fields, found):
    with pytest.raises(ModelFileError) as caught:
        moe_of(folder, tmp_path, fields)
    assert found in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields", [spm(), rwkv(), *({KIND: kind} for kind in ("gpt2", "bert", "t5", "gemma4", "whitespace"))]
)
def test_tokenizers_that_are_whole(folder, tmp_path, fields):
    llm = moe_of(folder, tmp_path, fields)
    for text in ("z é 中\n😀".encode(), bytes(range(1, 256))):
        assert llm.tokenize(text)
    llm.close()


def test_doctor_says_it_too(folder, tmp_path):
    path = changed(folder, tmp_path, "dense.gguf", "full_attention_interval", 0)
    command = [sys.executable, "-m", "draftwood", "doctor", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "full_attention_interval is 0; expected 1 to" in problem["found"]
    assert "download the file again" in problem["fix"]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (b"synthetic qwen35moe", b"synthetic \xff\xfe\xfdn35moe", "no UTF-8 in general.name"),
        (b"general.name", b"general.n\xffme", "no UTF-8 in the name of a field"),
        (b"{% endif", b"{% endig", "has a chat template that does not parse"),
    ],
)
def test_texts_that_are_none(folder, tmp_path, old, new, found):
    data = (folder / "moe.gguf").read_bytes()
    assert old in data
    path = tmp_path / "changed.gguf"
    path.write_bytes(data.replace(old, new))
    with pytest.raises(ModelFileError, match=found) as caught:
        Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    assert caught.value.hint


def test_a_template_that_fails(folder, tmp_path):
    data = (folder / "dense.gguf").read_bytes()
    path = tmp_path / "changed.gguf"
    path.write_bytes(data.replace(b"{{ message.role }}", b"{{ massage.role }}"))
    llm = Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    with pytest.raises(UnsupportedError, match="'massage' is undefined") as caught:
        llm.create_chat_completion([{"role": "user", "content": "x"}], max_tokens=1)
    assert caught.value.hint
    llm.close()


def test_tokens_that_are_the_same(folder, tmp_path):
    data = bytearray((folder / "moe.gguf").read_bytes())
    header = damaged_header.header_of(bytes(data))
    tokens = next(each for each in header.values if len(each) > 300 and each[0].kind == 8)
    first, second = [each.at for each in tokens if each.size == 1][:2]
    data[second] = data[first]
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="as one before; expected texts that differ"):
        Llama(str(path), n_ctx=256, n_threads=1, verbose=False)


@pytest.mark.parametrize(("name", "type_"), [("output_norm.weight", 26), ("output.weight", 25)])
def test_tensors_of_other_types(folder, tmp_path, name, type_):
    data = bytearray((folder / "moe.gguf").read_bytes())
    header = damaged_header.header_of(bytes(data))
    names = [data[each.at : each.at + each.size].decode() for each in header.names]
    struct.pack_into("<I", data, header.tensor_types[names.index(name)], type_)
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=rf"the tensor {name} is of type i\d+; expected"):
        Llama(str(path), n_ctx=256, n_threads=1, verbose=False)


@pytest.mark.parametrize("name", ["layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon"])
@pytest.mark.parametrize("value", [NAN, -1.0])
def test_an_epsilon_of_any_architecture(tmp_path, name, value):
    """ggml asserts it when it computes; a header of gemma3 has no other field that is looked at."""
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_float32(f"gemma3.attention.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=f"gemma3.attention.{name} is .*; expected 0 to 1"):
        probe_model(str(path))
