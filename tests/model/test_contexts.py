"""Contexts that cannot be made are refused in words."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from draftwood import Llama, OptionError, UnsupportedError
from draftwood._llama_cpp import _internals
from draftwood._llama_cpp import llama_cpp as native
from draftwood.load import contexts
from draftwood.load.arguments import CACHE_TYPES, CPU_CACHE_TYPES

SMALL = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, "speculation": "off"}


@pytest.fixture
def open_model(gguf, llama_arch):
    """open_model("planted-moe", n_ctx=64) -> Llama on a preset, or on the model of architecture "llama"."""
    made = []

    def load(kind="planted-moe", **settings):
        made.append(Llama(llama_arch if kind == "llama" else gguf(kind), **{**SMALL, **settings}))
        return made[-1]

    yield load
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "numbers",
    [
        {"attention.sliding_window": "4096"},
        {"attention.kv_lora_rank": "512"},
        {"attention.head_count_kv": None},
        {"attention.head_count": "[8, 4, 8]"},
        {"attention.head_count": "0"},
        {"embedding_length": None},
    ],
    ids=str,
)
def test_other_caches_are_left_to_llama_cpp(open_model, numbers):
    whole = open_model("llama", n_ctx=64)._model
    metadata = {**whole.metadata(), **{f"llama.{name}": value for name, value in numbers.items()}}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    other = SimpleNamespace(metadata=lambda: metadata, model=whole.model, params=whole.params)
    assert contexts.attention_of(whole) is not None
    assert contexts.attention_of(other) is None


def test_llama_cpp_warns_once_of_two_contexts(open_model, capfd):
    open_model(n_ctx=8192, speculation="mtp")
    assert capfd.readouterr().err.count("possible training context overflow") == 1
    open_model(n_ctx=8192)
    assert capfd.readouterr().err.count("possible training context overflow") == 1


def test_context_larger_than_memory(open_model, monkeypatch):
    monkeypatch.setattr(contexts, "host_memory", lambda: (1 << 18, 1 << 40))
    open_model(n_ctx=256)
    with pytest.raises(OptionError, match=r"n_ctx is 2048, for which .* expected at most") as caught:
        open_model(n_ctx=2048)
    assert "flash_attn=True, type_k=8" in caught.value.hint
    with pytest.raises(OptionError, match=r"n_ctx is 4096"):  # what the model was trained on
        open_model(n_ctx=0)


@pytest.mark.parametrize(("name", "n_ubatch"), [("n_ubatch", 1024), ("n_batch", 0)])
def test_batch_that_the_system_would_not_grant(open_model, monkeypatch, name, n_ubatch):
    """n_ubatch=0 means all of n_batch."""
    monkeypatch.setattr(contexts, "host_memory", lambda: (1 << 40, 1000 * contexts._ROW_BYTES))
    with pytest.raises(OptionError, match=rf"{name} is 1024, for which .* expected at most 768") as caught:
        open_model(n_ctx=1024, n_batch=1024, n_ubatch=n_ubatch)
    assert "n_ubatch=512" in caught.value.hint
    open_model(n_ctx=1024, n_batch=768, n_ubatch=n_ubatch)


@pytest.mark.parametrize("known", [True, False])
def test_memory_of_this_machine(monkeypatch, known):
    """Linux says what is left; elsewhere ggml does."""
    if not known:
        monkeypatch.setattr(contexts.memory, "with_swap", lambda: None)
    left, whole = contexts.host_memory()
    assert 1 << 28 < left <= whole < 1 << 50


def test_memory_of_a_cgroup(monkeypatch):
    monkeypatch.setattr(contexts.memory, "with_swap", lambda: (5, 7))
    assert contexts.host_memory() == (5, 7)


@pytest.mark.parametrize(
    "arguments",
    [
        "n_ctx=2 * 10**9",
        "n_ctx=10**8",
        "n_ctx=10**5, n_batch=10**5, n_ubatch=10**5",
        "n_ctx=10**5, n_batch=10**5, n_ubatch=0",
    ],
)
def test_sizes_that_end_the_process(gguf, python, arguments):
    """Tried in a process that may take no more than 16 GiB: without the refusal it fails in another way."""
    done = python(
        f"""
        import resource, sys
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        from draftwood import Llama, OptionError
        from draftwood.load import contexts
        contexts.host_memory = lambda: (16 << 30, 16 << 30)
        try:
            Llama(sys.argv[1], {arguments}, verbose=False)
        except OptionError as error:
            print(error)
        """,
        gguf("moe-mtp"),
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert re.match(r"n_u?\w+ is \d+, for which llama.cpp sets aside .* GiB or more", done.stdout)
    assert "hint:" in done.stdout


def test_a_failure_says_why(open_model, capfd):
    """With verbose=False upstream's log hides llama.cpp's errors, and its exception has none of them."""
    llm = open_model()
    params = llm.context_params
    params.type_v = native.GGML_TYPE_Q8_0
    with pytest.raises(
        UnsupportedError, match=r"no context of n_ctx=512.*: quantized V cache requires"
    ) as caught:
        _internals.LlamaContext(model=llm._model, params=params, verbose=False)
    assert "verbose=True" in caught.value.hint
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("type_", [*CACHE_TYPES.values(), *CPU_CACHE_TYPES])
def test_every_type_of_cache_that_is_taken_works(open_model, type_):
    """On this machine's CPU, with drafts and without; heads of 256 values hold whole blocks of every type."""
    for speculation in ("mtp", "off"):
        llm = open_model("real-heads", type_k=type_, type_v=type_, flash_attn=True, speculation=speculation)
        done = llm.create_completion([5, 6, 7], max_tokens=8, temperature=0.0)
        assert done["usage"]["completion_tokens"] >= 8


@pytest.mark.parametrize(
    ("kind", "arguments", "found"),
    [
        ("odd", {"type_k": 8}, "type_k is 8, a type of blocks of 32 values, and this model has rows of 132"),
        ("odd", {"type_k": 8, "flash_attn": True}, "type_k is 8, .* rows of 44"),
        ("odd", {"type_v": 2, "flash_attn": True}, "type_v is 2, .* rows of 44"),
        ("planted-moe", {"type_k": 12}, "type_k is 12, a type of blocks of 256 values, .* rows of 128"),
        ("planted-moe", {"type_k": 99}, "type_k is 99; expected one of 0 "),
        ("planted-moe", {"type_v": 99, "flash_attn": True}, "type_v is 99; expected one of 0 "),
        ("planted-moe", {"type_v": 8}, "type_v=8 without flash_attn=True"),
    ],
    ids=str,
)
def test_types_of_a_cache_that_end_the_process(gguf, python, open_model, kind, arguments, found):
    done = python(
        """
        import sys
        from draftwood import Llama
        Llama(sys.argv[1], n_ctx=256, verbose=False, **eval(sys.argv[2]))
        """,
        gguf(kind),
        repr(arguments),
    )
    assert (done.returncode, "OptionError" in done.stderr) == (1, True), done.stderr[-800:]
    with pytest.raises(OptionError, match=found) as caught:
        open_model(kind, **arguments)
    assert caught.value.hint


def test_arguments_of_numpys_types_are_taken(open_model):
    numbers = {"type_k": 8, "n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1}
    settings = {name: np.int64(number) for name, number in numbers.items()}
    llm = open_model("small-heads", **settings, n_threads_batch=-1, speculation="mtp")
    assert llm.create_completion([5, 6, 7], max_tokens=8)["usage"]["completion_tokens"] >= 8


def test_rows_of_several_heads_hold_blocks_that_one_does_not(open_model):
    llm = open_model("small-heads", type_k=8)  # 4 heads of 16
    assert llm.create_completion([5, 6, 7], max_tokens=8)["usage"]["completion_tokens"] >= 8
    with pytest.raises(OptionError, match="rows of 16"):
        open_model("small-heads", type_k=8, flash_attn=True)
