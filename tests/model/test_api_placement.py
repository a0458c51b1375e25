"""n_cpu_moe=, tensor_buft_overrides= and LangChain's fixed arguments: what reaches llama.cpp."""

from __future__ import annotations

import pickle
import re
import warnings

import numpy as np
import pytest
from draftwood import Llama, OptionError
from draftwood.load.devices import buffer_types
from draftwood.load.placement import tensor_overrides

from tests.model.texts import text

LANGCHAIN = {"rope_freq_base": 10000.0, "rope_freq_scale": 1.0, "n_batch": 8, "n_parts": -1, "f16_kv": True}


def rows(array):
    return [] if array is None else [(row.pattern, row.buft) for row in array]


def test_rows_end_with_a_null_one():
    cpu = buffer_types()["CPU"]
    found = rows(tensor_overrides(2, {r"blk\.0\.ssm_.*": "CPU"}))
    assert found[-1] == (None, None)
    assert found[0] == (rb"blk\.0\.ssm_.*", cpu)
    assert {buft for _, buft in found[:-1]} == {cpu}
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(4) for part in ("up", "down", "gate")]
    matched = [name for name in names if any(re.search(p.decode(), name) for p, _ in found[1:-1])]
    assert matched == names[:6], "the experts of the first two layers"
    assert tensor_overrides(0, None) is tensor_overrides(0, {}) is None
    assert rows(tensor_overrides(0, "a.*=CPU,b=CPU")) == [(b"a.*", cpu), (b"b", cpu), (None, None)]


@pytest.mark.parametrize("speculation", ["mtp", "off"])
def test_the_text_stays_and_the_library_was_told(gguf, llama, python, speculation):
    expected = text(llama(speculation=speculation))
    settings = {"n_cpu_moe": 1, "tensor_buft_overrides": {r"token_embd": "CPU"}}
    assert text(llama(speculation=speculation, **settings)) == expected
    done = python(
        """
        import sys, ctypes
        from draftwood import Llama
        from draftwood._llama_cpp import llama_cpp
        said = []
        llm = None
        @llama_cpp.llama_log_callback
        def log(level, text, user_data):
            said.append(text.decode())
        import draftwood._llama_cpp._logger as logger
        logger.llama_log_callback = log
        llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
        Llama(sys.argv[1], n_ctx=64, n_cpu_moe=1, tensor_buft_overrides="ssm_out=CPU", verbose=True)
        print("".join(line for line in said if "overridden" in line))
        """,
        gguf("planted-moe"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = set(re.findall(r"tensor (\S+) .*overridden to CPU", done.stdout))
    assert {"blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight"} <= told
    assert not any(name.startswith("blk.1.ffn") for name in told)
    assert any(name.endswith("ssm_out.weight") for name in told)


def test_pickle_keeps_them(llama):
    llm = llama(n_cpu_moe=1, tensor_buft_overrides={"ssm_out": "CPU"})
    state = llm.__getstate__()
    assert (state["n_cpu_moe"], state["tensor_buft_overrides"]) == (1, {"ssm_out": "CPU"})
    copy = pickle.loads(pickle.dumps(llm))
    assert text(copy) == text(llm)
    copy.close()


def test_values_of_numpys_types(llama):
    given = {"n_gpu_layers": np.int64(0), "n_cpu_moe": np.int64(1), "draft_tokens": np.int64(3)}
    llm = llama(exact=np.bool_(True), seed=np.int64(7), flash_attn=np.bool_(False), **given)
    state = llm.__getstate__()
    assert {name: repr(state[name]) for name in given} == {name: str(value) for name, value in given.items()}
    assert (state["exact"], state["flash_attn"]) == (True, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1; expected a number of layers"),
        ({"n_cpu_moe": True}, "n_cpu_moe is True"),
        ({"n_cpu_moe": "2"}, "n_cpu_moe is '2'"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers is 'all'; expected a whole number"),
        ({"tensor_split": "x"}, "tensor_split is 'x'; expected a list of numbers"),
        ({"flash_attn": "off"}, "flash_attn is 'off'; expected True, False or None"),
        ({"tensor_buft_overrides": {"x": "CUDA7"}}, "buffer type 'CUDA7'; expected one of .*'CPU'"),
        ({"tensor_buft_overrides": {"(": "CPU"}}, "no regular expression"),
        ({"tensor_buft_overrides": "x"}, "expected regex=name"),
        ({"tensor_buft_overrides": 5}, "expected a dict"),
    ],
    ids=str,
)
def test_what_makes_no_sense(gguf, settings, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of cards before
        with pytest.raises(OptionError, match=words):
            Llama(gguf("planted-moe"), **settings)


# --- what LangChain passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["mtp", "off"])
def test_langchains_arguments_are_corrected(llama, speculation):
    plain = llama(speculation=speculation, n_batch=512)
    with pytest.warns(UserWarning, match="which LangChain passes for every model") as seen:
        llm = llama(speculation=speculation, **LANGCHAIN)
    assert len(seen) == 1, "one warning says it all"
    assert "n_batch is raised from 8 to 512" in str(seen[0].message)
    assert llm.n_batch == plain.n_batch
    assert text(llm) == text(plain)


def test_other_values_and_other_models_are_left_alone(llama, llama_arch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = llama(speculation="off", rope_freq_base=500.0, rope_freq_scale=1.0, n_batch=8)
        assert (asked.context_params.rope_freq_base, asked.n_batch) == (500.0, 8)
        other = Llama(llama_arch, n_ctx=64, verbose=False, speculation="off", **LANGCHAIN)
        assert (other.context_params.rope_freq_base, other.n_batch) == (10000.0, 8)
        other.close()
