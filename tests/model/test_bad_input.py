"""Files, arguments and machines that are not as they should be: one exception in words, then all works again.

Every case runs in this process, with an open `Llama` beside it that must go on as if nothing had happened.
What may end the process is tried in another one first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import draftwood.load.arguments
import draftwood.load.preparation
import pytest
from draftwood import (
    ClosedError,
    DraftwoodError,
    Llama,
    LlamaPromptLookupDecoding,
    ModelFileError,
    OptionError,
    UnsupportedError,
)
from draftwood.load.devices import cards

from tests.model.rig import PROMPT

P = list(PROMPT)
DRAFTER = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "dflash-f16.gguf"
SMALL = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def witness(gguf) -> Iterator[tuple[Llama, list[int]]]:
    """A model that is open all the time, and what it says."""
    llm = Llama(gguf("planted-moe"), **SMALL)
    yield llm, take(llm)
    llm.close()


def take(llm, n=12):
    tokens = []
    for token in llm.generate(P, temp=0.0):
        tokens.append(token)
        if len(tokens) == n:
            break
    return tokens


@contextlib.contextmanager
def refused(kind, witness, *parts):
    """The block raises exactly `kind`; its text has all `parts`; the witness is not disturbed."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind
    assert isinstance(caught.value, DraftwoodError)
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
    assert "  " not in text
    assert len(text.splitlines()[0]) < 400
    llm, expected = witness
    llm.reset()
    assert take(llm) == expected


# --- files ---------------------------------------------------------------------------------------------


CUTS = [0, 1, 3, 4, 5, 8, 12, 20, 24, 25, 100, 1000, 5000, 9000]


@pytest.mark.parametrize("length", CUTS)
def test_cut_in_the_header(gguf, tmp_path, witness, length):
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(gguf("moe-mtp")).read_bytes()[:length])
    with refused(ModelFileError, witness, str(path), "expected", "download the file again"):
        Llama(str(path), **SMALL)


@pytest.mark.parametrize("part", [0.05, 0.5, 0.99, -1])
def test_cut_in_the_tensors(gguf, tmp_path, witness, part):
    whole = Path(gguf("moe-mtp")).read_bytes()
    length = len(whole) - 1 if part == -1 else int(len(whole) * part)
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:length])
    with refused(
        ModelFileError, witness, "is cut off", f"found {length} bytes", f"expects {len(whole)}", "download"
    ):
        Llama(str(path), **SMALL)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "(none)"),
        (b"PK\x03\x04" + bytes(5000), "50 4b 03 04"),
        (b"GGML" + bytes(5000), "47 47 4d 4c"),
        (b"FUGG" + bytes(5000), "46 55 47 47"),
        (b"\x80\x04\x95\x00" * 100, "80 04 95 00"),
        (b'{"__metadata__":{}}', "7b 22 5f 5f"),
        (b"GG", "47 47"),
    ],
    ids=["empty", "zip", "ggml", "byte-swapped", "pickle", "json", "two bytes"],
)
def test_foreign_file(tmp_path, witness, content, found):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with refused(
        ModelFileError, witness, str(path), f"starts with bytes {found}, expected 47 47 55 46", "hint:"
    ):
        Llama(str(path), **SMALL)


def test_junk_behind_the_magic(tmp_path, witness):
    chance = random.Random(3)
    path = tmp_path / "junk"
    for version in (b"\x03\x00\x00\x00", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff"):
        path.write_bytes(b"GGUF" + version + chance.randbytes(5000))
        with refused(ModelFileError, witness, "damaged or cut-off header", "expected"):
            Llama(str(path), **SMALL)


def test_directory(tmp_path, witness):
    with refused(ModelFileError, witness, str(tmp_path), "is a directory", "expected a GGUF file", "hint:"):
        Llama(str(tmp_path), **SMALL)


@pytest.mark.parametrize("name", ["none.gguf", "none/none.gguf", "a\0b"])
def test_missing(tmp_path, witness, name):
    with refused(ModelFileError, witness, "does not exist", str(tmp_path), "hint:"):
        Llama(str(tmp_path / name), **SMALL)
    with refused(ModelFileError, witness, "does not exist", "hint:"):
        Llama("", **SMALL)


def test_device_file(witness):
    with refused(ModelFileError, witness, "/dev/null", "not a GGUF file"):
        Llama("/dev/null", **SMALL)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """The superuser may read everything; another user for a moment may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission(gguf, witness):
    path = Path("/tmp") / f"draftwood-{os.getpid()}.gguf"  # the folders above must be open to everybody
    shutil.copyfile(gguf("moe-mtp"), path)
    path.chmod(0)
    try:
        with (
            without_privileges(),
            pytest.raises(ModelFileError, match="cannot be opened for reading") as caught,
        ):
            Llama(str(path), **SMALL)
        assert str(path) in str(caught.value)
    finally:
        path.unlink()
    llm, expected = witness
    llm.reset()
    assert take(llm) == expected


def test_paths_of_other_types(gguf, witness):
    for path in (Path(gguf("planted-moe")), os.fsencode(gguf("planted-moe"))):
        llm = Llama(path, **SMALL)
        assert take(llm) == witness[1]
        llm.close()
    with pytest.raises(TypeError, match="NoneType"):
        Llama(None, **SMALL)


def test_damaged_headers_end_no_process(gguf, python, tmp_path):
    """Bytes of the header changed at random: the probe says something or nothing, and never aborts."""
    done = python(
        """
        import random, sys
        from pathlib import Path
        from draftwood.engine.engine import probe_model
        from draftwood import ModelFileError
        from draftwood._llama_cpp._logger import set_verbose
        set_verbose(False)
        whole, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
        chance, refused = random.Random(5), 0
        for round in range(400):
            head = bytearray(whole[:16000])
            for _ in range(chance.choice([1, 1, 2, 8])):
                at = chance.choice([chance.randrange(4, 64), chance.randrange(4, len(head))])
                head[at] = chance.choice([0, 1, 0x7f, 0x80, 0xff, chance.randrange(256)])
            path.write_bytes(bytes(head) + whole[16000:])
            try:
                probe_model(str(path))
            except ModelFileError:
                refused += 1
        print("refused", refused)
        """,
        gguf("dense-mtp", layers=4, width=64, ff=64),
        str(tmp_path / "damaged"),
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert int(done.stdout.split()[-1]) > 50


# --- adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("none.gguf", "LoRA path does not exist"),
        ("", "is a directory; expected a GGUF"),
        ("text.md", "is not a GGUF file"),
        ("model.gguf", "is no LoRA adapter of this model; expected"),
    ],
)
def test_lora_that_is_none(gguf, tmp_path, witness, name, found):
    """Upstream loads it, and its first decode ends the process: it looks for None in a null pointer."""
    (tmp_path / "text.md").write_text("# a text")
    shutil.copyfile(gguf("moe-mtp"), tmp_path / "model.gguf")
    for path in (str(tmp_path / name), tmp_path / name):
        with refused(ModelFileError, witness, found, str(tmp_path / name), "hint:"):
            Llama(gguf("planted-moe"), lora_path=path, **SMALL)


def test_no_lora(gguf, witness):
    for path in (None, ""):
        llm = Llama(gguf("planted-moe"), lora_path=path, **SMALL)
        assert take(llm) == witness[1]
        llm.close()


# --- models that cannot draft --------------------------------------------------------------------------


def test_mtp_of_a_model_without_it(gguf, witness):
    for preset in ("moe-plain", "dense-plain"):
        with refused(
            UnsupportedError, witness, "no MTP block", "expected a GGUF converted with", 'speculation="ngram"'
        ):
            Llama(gguf(preset), speculation="mtp", **SMALL)
        llm = Llama(gguf(preset), **SMALL)
        assert llm.speculation == "off"
        assert "no MTP block" in llm.speculation_reason
        assert len(take(llm)) == 12
        llm.close()


def test_mtp_of_another_architecture(llama_arch, witness):
    with refused(UnsupportedError, witness, "found architecture 'llama'", "'qwen35' and 'qwen35moe'"):
        Llama(llama_arch, speculation="mtp", **SMALL)
    llm = Llama(llama_arch, **SMALL)
    assert llm.speculation == "off"
    assert "found architecture 'llama'" in llm.speculation_reason
    assert len(take(llm)) == 12
    llm.close()


def test_file_that_says_more_than_it_holds(gguf, tmp_path, witness):
    """The header announces an MTP block whose tensors the file lacks."""
    data = Path(gguf("moe-mtp")).read_bytes()
    path = tmp_path / "lacking.gguf"
    path.write_bytes(data.replace(b"nextn.eh_proj.weight", b"nextn.eh_prox.weight"))
    with refused(UnsupportedError, witness, "found 1 MTP layers", "eh_proj"):
        Llama(str(path), speculation="mtp", **SMALL)


def test_sound_header_over_a_model_that_is_none(gguf, tmp_path, witness):
    """What only loading finds is said in llama.cpp's words; nothing stays behind."""
    data = Path(gguf("moe-mtp")).read_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data.replace(b"blk.1.attn_norm.weight", b"blk.1.attn_morn.weight"))
    missing = "tensor 'blk.1.attn_norm.weight' not found"
    with refused(ModelFileError, witness, "Failed to load model from file", str(path), missing, "hint:"):
        Llama(str(path), **SMALL)


@pytest.mark.parametrize("speculation", ["auto", "dflash"])
@pytest.mark.parametrize("name", ["other vocabulary", "no drafter"])
def test_drafter_of_another_model(gguf, witness, speculation, name):
    path = str(DRAFTER) if name == "other vocabulary" else gguf("moe-plain")
    found = {
        "other vocabulary": "the drafter has a vocabulary of 4096 tokens, the target one of 384",
        "no drafter": "has architecture 'qwen35moe'; expected 'dflash'",
    }[name]
    with refused(UnsupportedError, witness, found, path, "hint: drafter= takes the GGUF"):
        Llama(gguf("planted-moe"), drafter=path, speculation=speculation, **SMALL)


# --- arguments -----------------------------------------------------------------------------------------

ARGUMENTS = {
    "draft_tokens=0": ({"draft_tokens": 0}, OptionError, "draft_tokens is 0", "expected 1 to 63"),
    "draft_tokens=-1": ({"draft_tokens": -1}, OptionError, "draft_tokens is -1", "expected 1 to 63"),
    "draft_tokens=64": ({"draft_tokens": 64}, OptionError, "draft_tokens is 64", "expected 1 to 63"),
    "draft_tokens='3'": (
        {"draft_tokens": "3"},
        OptionError,
        "draft_tokens is '3'",
        "expected a whole number",
    ),
    "draft_tokens=True": (
        {"draft_tokens": True},
        OptionError,
        "draft_tokens is True",
        "expected a whole number",
    ),
    "draft_tokens=2.5": (
        {"draft_tokens": 2.5},
        OptionError,
        "draft_tokens is 2.5",
        "expected a whole number",
    ),
    "draft_p_min=nan": (
        {"draft_p_min": float("nan")},
        OptionError,
        "draft_p_min is nan",
        "expected a probability",
    ),
    "draft_p_min=-1": ({"draft_p_min": -1}, OptionError, "draft_p_min is -1", "expected a probability"),
    "draft_p_min=2": ({"draft_p_min": 2}, OptionError, "draft_p_min is 2", "expected a probability"),
    "draft_vocab=63": ({"draft_vocab": 63}, OptionError, "draft_vocab is 63", "expected 64 to"),
    "draft_vocab=all": ({"draft_vocab": "all"}, OptionError, "draft_vocab is 'all'", "expected 64 to"),
    "n_ctx=-1": ({"n_ctx": -1}, OptionError, "n_ctx is -1", "expected a whole number of at least 0"),
    "n_batch=-5": ({"n_batch": -5}, OptionError, "n_batch is -5", "expected a whole number of at least 1"),
    "n_batch=0": ({"n_batch": 0, "speculation": "off"}, OptionError, "n_batch is 0", "at least 1"),
    "speculation": (
        {"speculation": "trees"},
        OptionError,
        "speculation is 'trees'",
        "expected one of 'auto', 'off', 'mtp'",
        "'tree'",
    ),
    "drafter": ({"drafter": "x"}, ModelFileError, "Drafter path does not exist: x", "check the path"),
    "drafter that is a folder": (
        {"drafter": str(DRAFTER.parent)},
        ModelFileError,
        f"{DRAFTER.parent} is a directory; expected a GGUF file",
    ),
    "empty drafter": ({"drafter": ""}, OptionError, "drafter is ''; expected the path", "or leave it out"),
    "seed": ({"seed": "x"}, OptionError, "seed is 'x'; expected a whole number", "seed=1"),
    "drafter that is no path": (
        {"drafter": object()},
        OptionError,
        "drafter is of type object",
        "drafter=path",
    ),
    "class as draft_model": (
        {"draft_model": LlamaPromptLookupDecoding},
        OptionError,
        "found the class LlamaPromptLookupDecoding",
        "hint: draft_model=LlamaPromptLookupDecoding()",
    ),
    "path as draft_model": (
        {"draft_model": "small.gguf"},
        OptionError,
        "found 'small.gguf' as draft_model=",
        "hint: drafter=path, if it is the GGUF of a DFlash drafter",
    ),
    "dflash": ({"speculation": "dflash"}, OptionError, "without a drafter", "drafter=path"),
    "tree_budget=0": ({"tree_budget": 0}, OptionError, "tree_budget is 0", "1 to 64", "leave it out"),
    "tree_budget=65": ({"tree_budget": 65}, OptionError, "tree_budget is 65", "expected 1 to 64 nodes"),
    "tree_budget=True": ({"tree_budget": True}, OptionError, "tree_budget is True", "expected 1 to 64 nodes"),
    "tree_budget='8'": ({"tree_budget": "8"}, OptionError, "tree_budget is '8'", "expected 1 to 64 nodes"),
    "tree_budget without a drafter": (
        {"tree_budget": 8, "speculation": "off"},
        OptionError,
        'tree_budget=8 beside speculation="off"',
        "expected a drafter",
    ),
    "embedding": (
        {"embedding": True, "speculation": "mtp"},
        UnsupportedError,
        "embedding=True",
        'speculation="auto"',
    ),
    "vocab_only": (
        {"vocab_only": True, "speculation": "mtp"},
        UnsupportedError,
        "vocab_only=True",
        'speculation="auto"',
    ),
    "draft_model and tree_budget": (
        {"draft_model": lambda ids: ids, "tree_budget": 8},
        OptionError,
        "draft_model= beside tree_budget=8",
        "expected chains",
    ),
    "draft_model": (
        {"draft_model": lambda ids: ids, "speculation": "mtp"},
        OptionError,
        "draft_model= beside speculation='mtp'",
        "leave speculation= and drafter= out",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(gguf, witness, name):
    arguments, kind, *parts = ARGUMENTS[name]
    with refused(kind, witness, *parts):
        Llama(gguf("moe-mtp"), **{**SMALL, **arguments})


@pytest.mark.parametrize(
    ("n_batch", "drafts"),
    [
        (10, {"speculation": "mtp", "draft_tokens": 8, "n_ctx": 8}),  # contexts have 256 cells at least
        (16, {"speculation": "tree", "draft_tokens": 8, "n_ctx": 10}),
        (10, {"speculation": "tree", "draft_tokens": 8, "tree_budget": 2}),
        (64, {"speculation": "tree", "draft_tokens": 8, "tree_budget": 64}),
        (10, {}),  # trees nobody asked for fit themselves
    ],
    ids=["chains", "small tree context", "trees without drafts", "largest trees", "auto"],
)
def test_smallest_context_and_batch_that_work(gguf, witness, n_batch, drafts):
    settings = {**SMALL, **drafts}
    llm = Llama(gguf("planted-moe"), **settings, n_batch=n_batch)  # a warning would be an error
    assert take(llm) == witness[1]
    llm.close()
    with pytest.warns(UserWarning, match=f"found n_batch={n_batch - 1}; a draft needs at least {n_batch},"):
        llm = Llama(gguf("planted-moe"), **settings, n_batch=n_batch - 1)
    assert take(llm) == witness[1]
    llm.close()


@pytest.mark.parametrize("speculation", ["auto", "mtp", "tree", "ngram", "off"])
def test_contexts_are_rounded_up(gguf, witness, speculation):
    for n_ctx in (1, 8, 255, 256):
        llm = Llama(gguf("planted-moe"), **{**SMALL, "n_ctx": n_ctx}, speculation=speculation)
        assert llm.n_ctx() == 256
        assert take(llm) == witness[1]
        llm.close()


def test_a_llama_is_no_draft_model(gguf, witness):
    for name, found in (
        ("draft_model", "found a Llama as draft_model="),
        ("drafter", "drafter is of type Llama"),
    ):
        with refused(OptionError, witness, found, "drafter=path"):
            Llama(gguf("planted-moe"), **{name: witness[0]}, **SMALL)


PROMPTS = {
    "several": (["a", "b"], "with a part of type str", "one call for each prompt"),
    "none": (None, "of type NoneType", 'llm("text")'),
    "bytes": (b"a", "of type bytes", 'llm("text")'),
    "None among tokens": ([3, None], "with a part of type NoneType"),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_none(gguf, witness, name, stream):
    prompt, *parts = PROMPTS[name]
    with refused(OptionError, witness, "found a prompt", "expected a str or a list of token ids", *parts):
        result = witness[0](prompt, max_tokens=2, stream=stream)
        if stream:
            next(result)


MESSAGES = {
    "text": ("hi", "found messages of type str"),
    "none": (None, "found messages of type NoneType"),
    "one dict": ({"role": "user", "content": "hi"}, "found messages of type dict"),
    "texts": (["hi"], "found a message of type str"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_are_none(witness, name):
    messages, found = MESSAGES[name]
    with refused(
        OptionError, witness, found, "expected a list of dicts", 'hint: create_chat_completion([{"role"'
    ):
        witness[0].create_chat_completion(messages)


def test_variables_of_a_template_as_arguments(witness):
    message = {"role": "user", "content": "hi"}
    with pytest.raises(TypeError, match=r"chat_template_kwargs=\{'enable_thinking': False\}"):
        witness[0].create_chat_completion([message], enable_thinking=False)
    with pytest.raises(TypeError, match=r"missing a required argument: 'messages'$"):
        witness[0].create_chat_completion()


def test_arguments_that_nobody_knows(gguf, witness):
    with pytest.warns(UserWarning, match="found specualtion= .did you mean speculation=") as caught:
        llm = Llama(gguf("planted-moe"), specualtion="off", tree_bugdet=8, n_parts=-1, **SMALL)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert llm.speculation == "mtp"
    assert take(llm) == witness[1]
    llm.close()


def test_layers_for_a_card_that_is_not_there(gguf, witness, monkeypatch):
    monkeypatch.setattr(draftwood.load.preparation, "cards", lambda: [])
    monkeypatch.setattr(draftwood.load.arguments, "_said", set())
    for n_gpu_layers, says in ((0, False), (2, True), (-1, False)):  # once a process
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm = Llama(gguf("planted-moe"), n_gpu_layers=n_gpu_layers, **SMALL)
        assert [each.filename for each in caught] == [__file__] * says
        assert all("found n_gpu_layers=2" in str(each.message) for each in caught)
        if not says or not cards():
            assert take(llm) == witness[1]
        llm.close()


def test_contexts_that_generate_nothing(gguf):
    for arguments in ({"embedding": True}, {"vocab_only": True}):
        llm = Llama(gguf("moe-mtp"), **SMALL, **arguments)
        assert llm.speculation == "off"
        assert next(iter(arguments)) in llm.speculation_reason
        assert llm.speculation_stats is None
        assert llm.detokenize(llm.tokenize(b"one two", add_bos=False)) == b"one two"
        if "embedding" in arguments:
            assert len(llm.embed("one two")) > 0
        llm.close()


WORK = {
    "create_completion": lambda llm: llm.create_completion("x", max_tokens=2),
    "stream": lambda llm: list(llm.create_completion("x", max_tokens=2, stream=True)),
    "chat": lambda llm: llm.create_chat_completion([{"role": "user", "content": "x"}], max_tokens=2),
    "generate": lambda llm: next(llm.generate([1, 2, 3])),
    "eval": lambda llm: llm.eval([1]),
    "sample": lambda llm: llm.sample(),
}


@pytest.mark.parametrize("name", WORK)
def test_generating_with_a_vocabulary_only(gguf, python, witness, name):
    """Upstream: AssertionError, without a word or with "Memory is not initialized"."""
    llm = Llama(gguf("moe-mtp"), vocab_only=True, **SMALL)
    with refused(UnsupportedError, witness, "found vocab_only=True", "expected", "leave vocab_only out"):
        WORK[name](llm)
    assert llm.detokenize(llm.tokenize(b"one two", add_bos=False)) == b"one two"
    llm.close()


def test_embeddings_of_a_vocabulary_only(gguf, witness):
    with refused(OptionError, witness, "vocab_only=True beside embedding=True", "leave vocab_only out"):
        Llama(gguf("moe-mtp"), vocab_only=True, embedding=True, **SMALL)


def test_a_model_that_keeps_no_text(gguf, witness, monkeypatch):
    llm = Llama(gguf("moe-mtp"), speculation="off", exact=False, **SMALL)  # upstream's loop
    monkeypatch.setattr(llm._ctx, "memory", None)
    with refused(UnsupportedError, witness, "found a model that keeps no text", "embedding=True"):
        llm.create_completion("x", max_tokens=2)
    llm.close()


@pytest.mark.parametrize("token", [-1, -(2**31), 384, 2**31 - 1])
def test_tokens_that_are_none(gguf, witness, token):
    llm = Llama(gguf("planted-moe"), **SMALL)
    for prompt in ([token], [1, 2, token], [token, 1]):
        with refused(OptionError, witness, f"token {token}", "expected 0 to 383", "hint: tokenize()"):
            next(llm.generate(prompt))
        with refused(OptionError, witness, f"token {token}", "from 0 to 383", "hint: tokenize()"):
            llm.detokenize(prompt)
        with refused(OptionError, witness, f"token {token}"):
            llm.eval(prompt)
        llm.reset()
    generator = llm.generate(P, temp=0.0)
    next(generator)
    with refused(OptionError, witness, f"token {token}"):
        generator.send([token])
    assert take(llm) == witness[1]
    llm.close()


@pytest.mark.parametrize("drafted", [None, "x", [384], [[0, -1]], [1 << 40]], ids=str)
def test_draft_model_that_gives_no_tokens(gguf, witness, drafted):
    llm = Llama(gguf("planted-moe"), draft_model=lambda ids: drafted, **SMALL)
    generator = llm.generate(P, temp=0.0)
    next(generator)
    with refused(
        OptionError, witness, "from draft_model=; expected token ids, 0 to 383", "hint: return an array"
    ):
        next(generator)
    llm.close()


def test_closed_while_it_generates(gguf, witness):
    llm = Llama(gguf("planted-moe"), **SMALL)
    generator = llm.generate(P, temp=0.0)
    next(generator)
    llm.close()
    with refused(
        ClosedError, witness, "found a Llama that was closed; expected", "hint: close the generator"
    ):
        next(generator)


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_a_context_that_goes_before_its_llama(gguf, speculation):
    """Collected as parts of a cycle they go in any order; the engine must not outlive the context."""
    program = f"""
import draftwood
llm = draftwood.Llama({gguf("planted-moe")!r}, n_ctx=128, speculation={speculation!r}, verbose=False)
next(llm.generate([1, 2, 3], temp=0.0))
llm._ctx.close()
llm.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- nothing leaks -------------------------------------------------------------------------------------


def mapped() -> dict[str, int]:
    """Open files, mappings and resident KiB of this process, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident": int(re.search(r"VmRSS:\s+(\d+)", status).group(1)),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"draft_tokens": 0},
        {"n_ctx": 4, "draft_tokens": 8},
        {"type_v": 8},
        {"embedding": True, "speculation": "mtp"},
        {"lora_path": "the model"},
        {},
    ],
    ids=["option", "context", "in llama.cpp", "unsupported", "adapter", "no error"],
)
def test_nothing_leaks(gguf, arguments):
    path = gguf("moe-mtp")
    if "lora_path" in arguments:
        arguments = {"lora_path": path}  # a GGUF, but no adapter

    def once():
        try:
            llm = Llama(path, **{**SMALL, **arguments})
        except ValueError:
            return
        take(llm, 3)
        llm.close()

    def rounds(n):
        for _ in range(n):
            once()
        return mapped()

    after = rounds(5)
    for _ in range(
        3
    ):  # what leaks does so each time; Linux may gather small pages to a large one at any time
        before, after = after, rounds(20)
        if after["resident"] <= before["resident"] + 4 * 1024 and after["maps"] <= before["maps"] + 5:
            break
    assert after["files"] <= before["files"]
    assert after["maps"] <= before["maps"] + 5, "one loaded model is 1 mapping at least: 20 left would show"
    assert after["resident"] <= before["resident"] + 4 * 1024, "20 contexts would be over 80 MiB"


@pytest.mark.parametrize("speculation", ["mtp", "off"])
def test_dropped_objects_are_freed_at_once(gguf, speculation):
    """No reference cycle keeps a model until the garbage collector comes by."""
    gc.collect()
    gc.disable()
    try:
        llm = Llama(gguf("moe-mtp"), speculation=speculation, **SMALL)
        assert len(take(llm)) == 12
        dropped = weakref.ref(llm)
        del llm
        assert dropped() is None
    finally:
        gc.enable()


def test_arguments_that_do_not_bind(capfd):
    with pytest.raises(TypeError, match="model_path"):
        draftwood.Llama()
    assert capfd.readouterr().err == ""


def test_loading_in_several_threads_keeps_stdout(gguf, python):
    """Upstream's silence is of the process: each thread alone would put back another's."""
    done = python(
        """
        import os, sys, threading
        from draftwood import Llama

        start = threading.Barrier(4)

        def load():
            for _ in range(5):
                start.wait()
                Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False).close()

        before, files = sys.stdout, len(os.listdir("/proc/self/fd"))
        threads = [threading.Thread(target=load) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sys.stdout is before
        assert len(os.listdir("/proc/self/fd")) == files
        print("still heard", flush=True)
        os.write(2, b"here too")
        """,
        gguf("planted-moe"),
    )
    assert (done.returncode, done.stdout) == (0, "still heard\n"), done.stderr
    assert done.stderr.startswith("here too")  # then Python, of upstream's two open files
