"""llama-cpp-python's arguments of `Llama`, before upstream's constructor sees them.

What it would end the process on is refused; what is corrected, or has no effect, is said in a UserWarning
that points at the caller of `Llama(...)`. Decides from the arguments and what it is told of the machine.
Must not know: the library, contexts.
Tests: tests/unit/test_arguments.py, tests/model/generate/test_prompt_batches.py.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from draftwood.coerce import as_bool, as_int
from draftwood.errors import OptionError
from draftwood.warn import warn

FLASH_ATTN_AUTO = -1  # llama.h
MAX_SIZE = (1 << 31) - 1  # llama.cpp counts tokens in 32 bits
# GGML_MAX_N_THREADS at the pin, or all cores of a larger machine. ggml does not hold to it: libgomp ends the
# process where the system grants no more threads, and far above it overruns its stack with their list
MAX_THREADS = max(512, os.cpu_count() or 1)
# ggml_types that a cache may have anywhere: kv_cache_types of llama.cpp's common/arg.cpp at the pin
CACHE_TYPES = dict(f32=0, f16=1, bf16=30, q8_0=8, q5_1=7, q5_0=6, q4_1=3, q4_0=2, iq4_nl=20)
# those that a CPU writes, too: q2_K to q6_K, iq4_xs, tq1_0, tq2_0, mxfp4, nvfp4, q1_0, q2_0
CPU_CACHE_TYPES = (10, 11, 12, 13, 14, 23, 34, 35, 39, 40, 41, 42)
_FLOATS = (0, 1, 30)
# LangChain's wrappers pass them always; llama-cpp-python once had them
_SWALLOWED = {"n_parts", "f16_kv", "device", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"}
_YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
_said: set[str] = set()  # what is said once a process


def check_devices(kwargs: dict[str, Any]) -> None:
    """Refuse wrong types of arguments that say what runs on which device, before anything else reads them.

    Values of other types become Python's own; flash_attn="auto" becomes None. Errors: OptionError.
    """
    if "n_gpu_layers" in kwargs:
        kwargs["n_gpu_layers"] = _checked_layers(kwargs["n_gpu_layers"])
    if kwargs.get("tensor_split") is not None:
        kwargs["tensor_split"] = _checked_split(kwargs["tensor_split"])
    if kwargs.get("flash_attn") is not None:
        kwargs["flash_attn"] = _checked_flash(kwargs["flash_attn"])


def _checked_layers(value: Any) -> int:
    number, hint = as_int(value), "n_gpu_layers=-1 for all layers"
    if as_bool(value) is False:  # `has_gpu and -1`
        return 0
    if number is None:
        raise OptionError(f"n_gpu_layers is {value!r}; expected a whole number", hint=hint)
    if number > MAX_SIZE:
        raise OptionError(f"n_gpu_layers is {number}; expected at most {MAX_SIZE}", hint=hint)
    return max(number, -1)  # to llama.cpp any negative number means all


def _checked_split(value: Any) -> list[float]:
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set))
    try:
        parts = [float(part) for part in value if not isinstance(part, str)] if is_list else []
        if is_list and len(parts) == len(value) and all(0.0 <= part < math.inf for part in parts):
            return parts
    except (TypeError, ValueError, OverflowError):
        pass
    raise OptionError(
        f"tensor_split is {value!r:.80}; expected a list of numbers, one for each card",
        hint="tensor_split=[3, 1], or leave it out",
    )


def _checked_flash(value: Any) -> bool | None:
    if (isinstance(value, str) and value == "auto") or as_int(value) == FLASH_ATTN_AUTO:
        return None
    flash = as_bool(value)
    if flash is None:
        raise OptionError(
            f"flash_attn is {value!r}; expected True, False or None",
            hint="leave it out for llama.cpp's auto",
        )
    return flash


def checked_seed(value: Any) -> int:
    """Return a seed as an int. Errors: OptionError for what is no whole number."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise OptionError(
            f"seed is {value!r:.80}; expected a whole number", hint="seed=1, or leave it out"
        ) from None


def check(kwargs: dict[str, Any], *, on_cards: bool, auto_flash: bool = False) -> None:
    """Refuse arguments that make no sense; whole numbers of other types become ints. Errors: OptionError.

    on_cards: whether the cache may be on a card. auto_flash: what the function of this name says.
    """
    _check_purpose(kwargs)
    _check_sizes(kwargs)
    if kwargs.get("seed") is not None:
        kwargs["seed"] = checked_seed(kwargs["seed"])
    _check_floats(kwargs)
    _check_cache_types(kwargs, on_cards, auto_flash)


def auto_flash(kwargs: dict[str, Any], *, on_cards: bool) -> bool:
    """Tell whether llama.cpp shall decide about flash attention: it is not set, and the cache is on cards.

    False if type_k is quantised and type_v is not. llama.cpp then rejects heads that are no multiple of the
    block size, and CUDA converts the whole cache to f16 at every step.
    """
    unset = kwargs.get("flash_attn") is None
    keys_only = _quantised(kwargs.get("type_k")) and not _quantised(kwargs.get("type_v"))
    return bool(unset and on_cards and kwargs.get("offload_kqv", True) and not keys_only)


def _quantised(type_: Any) -> bool:
    return as_int(type_) not in (None, *_FLOATS)


def _check_sizes(arguments: dict[str, Any]) -> None:
    """Refuse sizes that llama-cpp-python would take for others, say little of, or end the process on."""
    for name, least, example in (("n_ctx", 0, 4096), ("n_batch", 1, 512), ("n_ubatch", 0, 512)):
        if name in arguments:
            arguments[name] = within(name, arguments[name], (least, MAX_SIZE), _example(name, example))
    for name in ("n_threads", "n_threads_batch"):
        if arguments.get(name) is not None:  # 0 and None: the default (cores.py); -1 is llama.cpp's
            arguments[name] = within(name, arguments[name], (-1, MAX_THREADS), _example(name, 4))


def _check_floats(arguments: dict[str, Any]) -> None:
    """Refuse nan and infinities, with which a model writes nothing or nonsense."""
    for name in ("rope_freq_base", "rope_freq_scale", *_YARN):
        value = arguments.get(name, 0.0)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise OptionError(
                f"{name} is {value!r:.80}; expected a finite number",
                hint="leave it out for the model file's own value",
            )


def _example(name: str, value: int) -> str:
    return f"{name}={value}, or leave it out"


def within(name: str, value: Any, bounds: tuple[int, int], hint: str) -> int:
    """Return a whole number within bounds. Errors: OptionError."""
    (least, most), number = bounds, as_int(value)
    if number is None or number < least:
        raise OptionError(f"{name} is {value!r}; expected a whole number of at least {least}", hint=hint)
    if number > most:
        raise OptionError(f"{name} is {number}; expected at most {most}", hint=hint)
    return number


def _check_purpose(arguments: dict[str, Any]) -> None:
    """Refuse embeddings of a model without weights, which would end the process."""
    if arguments.get("vocab_only") and arguments.get("embedding"):
        raise OptionError(
            "found vocab_only=True beside embedding=True, which needs the weights; expected one of them",
            hint="leave vocab_only out",
        )


def _check_cache_types(arguments: dict[str, Any], on_cards: bool, auto_flash: bool) -> None:
    """Refuse types of a cache on which llama.cpp ends the process, or says no more than that it failed."""
    for name in ("type_k", "type_v"):
        value = arguments.get(name)
        if value is None:
            continue
        type_ = as_int(value)
        if type_ not in CACHE_TYPES.values() and (on_cards or type_ not in CPU_CACHE_TYPES):
            types = ", ".join(f"{number} ({known})" for known, number in CACHE_TYPES.items())
            meant = CACHE_TYPES.get(str(value), CACHE_TYPES["q8_0"])
            raise OptionError(
                f"{name} is {value!r}; expected one of {types}",
                hint=f"{name}={meant}, or leave it out for f16",
            )
        arguments[name] = type_
    type_v = arguments.get("type_v")
    if _quantised(type_v) and not (arguments.get("flash_attn") or auto_flash):  # "auto" turns it on for one
        raise OptionError(
            f"found type_v={type_v} without flash_attn=True; a quantised cache of values expects it",
            hint="flash_attn=True, or leave type_v out",
        )


def raise_batch(kwargs: dict[str, Any], needed: int) -> dict[str, int]:
    """Raise n_batch and n_ubatch in `kwargs` to what a draft needs, say so, and return what was raised.

    n_ubatch 0 means n_batch and stays.
    """
    small = {name: kwargs[name] for name in ("n_batch", "n_ubatch") if 0 < kwargs.get(name, needed) < needed}
    if small:
        found = ", ".join(f"{name}={value}" for name, value in small.items())
        warn(
            f"found {found}; a draft needs at least {needed}, which is used instead "
            '(speculation="off" leaves it as it is)'
        )
        kwargs.update(dict.fromkeys(small, needed))
    return small


def correct_langchain(kwargs: dict[str, Any], architecture: str) -> None:
    """Undo what LangChain's wrappers always pass, where it is wrong for Qwen3.5 models, and say so.

    They fix rope_freq_base=10000.0, rope_freq_scale=1.0 (Qwen3.5 was trained with 1e7; the text would be
    nonsense) and n_batch=8 (prompts eight tokens at a time). n_batch is corrected beside the other two only.
    """
    fixed = (kwargs.get("rope_freq_base"), kwargs.get("rope_freq_scale"))
    if fixed != (10000.0, 1.0) or architecture not in ("qwen35", "qwen35moe"):
        return
    kwargs.update(rope_freq_base=0.0, rope_freq_scale=0.0)
    changed = "the model file's own values are used instead"
    if kwargs.get("n_batch") == 8:
        kwargs["n_batch"] = 512
        changed += ", and n_batch is raised from 8 to 512"
    warn(
        "found rope_freq_base=10000.0 and rope_freq_scale=1.0, which LangChain passes for every model; "
        f"{changed} (pass rope_freq_base=0.0 to say so yourself)"
    )


def warn_of_unknown(kwargs: dict[str, Any], known: Collection[str]) -> None:
    """Warn of unknown arguments, which have no effect; upstream swallows any name in silence."""
    unknown = [name for name in kwargs if name not in known and name not in _SWALLOWED]
    if not unknown:
        return
    found = []
    for name in unknown:
        meant = difflib.get_close_matches(name, known, 1)
        found.append(f"{name}= (did you mean {meant[0]}=?)" if meant else f"{name}=")
    warn(
        f"found {', '.join(found)}, which Llama does not know; expected its own arguments or "
        "llama-cpp-python's, others have no effect"
    )


def warn_without_cards(n_gpu_layers: int, backends: Sequence[str], broken: tuple[str, str]) -> None:
    """Say once that layers stay on the CPU, whatever n_gpu_layers is: no device of `backends` is there.

    broken: why the build's CUDA backend cannot be loaded, and the fix; both are empty if it can.
    """
    if "cards" in _said:
        return
    _said.add("cards")
    if broken[0]:
        found, fix = f"a CUDA backend that cannot be loaded, {broken[0]}", broken[1]
    elif backends:
        found = f"no device that {' or '.join(backends)} can use"
        fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES, and `draftwood doctor`"
    else:
        found = "a build without a GPU's backend"
        fix = 'CMAKE_ARGS="-DGGML_CUDA=on" pip install . builds the one for CUDA'
    warn(f"found n_gpu_layers={n_gpu_layers} and {found}; every layer stays on the CPU ({fix})")
