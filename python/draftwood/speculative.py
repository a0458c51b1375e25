"""`Llama(speculative=SpecConfig(...))`: how a fork of llama-cpp-python spells drafting, in our arguments.

The names of types and fields are those of that fork, JamePeng's 0.3.49, and mostly of llama.cpp's `--spec-*`
flags. Any object with a `spec_type` is read, so one of the fork's own class is, too.
Must not know: the library. Tests: tests/unit/test_speculative.py, tests/model/test_speculative.py.
"""

from __future__ import annotations

import enum
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from draftwood.coerce import as_int
from draftwood.errors import OptionError, UnsupportedError
from draftwood.options import MAX_DRAFT_TOKENS, Options
from draftwood.warn import warn


class SpeculativeType(enum.Enum):
    """Kinds of drafters, by llama.cpp's names. Those from DRAFT_SIMPLE on are refused."""

    NONE = "none"
    DRAFT_MTP = "draft-mtp"
    DRAFT_DFLASH = "draft-dflash"
    NGRAM_SIMPLE = "ngram-simple"
    NGRAM_MAP_K = "ngram-map-k"
    NGRAM_MAP_K4V = "ngram-map-k4v"
    DRAFT_SIMPLE = "draft-simple"
    DRAFT_EAGLE3 = "draft-eagle3"
    DRAFT_DSPARK = "draft-dspark"
    NGRAM_MOD = "ngram-mod"
    NGRAM_CACHE = "ngram-cache"


_SPOKEN = {
    "none": "off",
    "mtp": "mtp",
    "dflash": "dflash",
    **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-k", "ngram-k4v"), "ngram"),
}


@dataclass
class SpecConfig:
    """What drafts (`drafting_of`). Fields after `ngram_size_m` have no effect."""

    spec_type: Any = SpeculativeType.NONE
    draft_n_max: int = 3
    draft_p_min: float = 0.0
    draft_model_path: str | None = None
    ngram_size_m: int = 48
    ngram_size_n: int = 12
    ngram_min_hits: int = 1
    ngram_max_entries_per_key: int | None = None
    draft_n_min: int = 0
    draft_p_split: float = 0.1
    draft_backend_sampling: bool = True
    draft_n_gpu_layers: int | str = "auto"
    draft_n_threads: int | None = None
    draft_n_threads_batch: int | None = None
    draft_cpu_moe: bool = False
    draft_n_cpu_moe: int = 0
    draft_devices: list[Any] = field(default_factory=list)
    draft_tensor_buft_overrides: Any = None
    draft_type_k: int | None = None
    draft_type_v: int | None = None
    draft_model_kwargs: dict[str, Any] = field(default_factory=dict)


_MAPPED = ("spec_type", "draft_n_max", "draft_p_min", "draft_model_path", "ngram_size_m")
_WITHOUT_EFFECT = {
    each.name: each.default_factory() if each.default_factory is not MISSING else each.default
    for each in fields(SpecConfig)
    if each.name not in _MAPPED
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """The arguments of `Llama` that a config stands for, by their names. Its defaults are theirs."""

    speculation: str = Options().speculation
    drafter: str | None = None
    draft_tokens: int | None = None
    draft_p_min: float = 0.0


def drafting_of(config: Any, beside: Drafting) -> Drafting:
    """Return what a config stands for.

    beside: these arguments as the caller gave them. Fields without a counterpart that differ from their
    defaults are named in one UserWarning. None of them changes text.
    Errors: OptionError for an object that is no such config, for values that make no sense, and for an
    argument that is given twice; UnsupportedError for a type, or a draft model, that cannot run here.
    """
    spoken = _speculation(config)
    defaults = asdict(Drafting())
    twice = [f"{name}={value!r}" for name, value in asdict(beside).items() if value != defaults[name]]
    if twice:
        raise OptionError(
            f"found {', '.join(twice)} beside speculative=; expected one place that says what drafts",
            hint="leave speculative= out, or set its fields",
        )
    if spoken == "off":
        return Drafting("off")
    _warn_of_ignored_fields(config)
    return Drafting(
        spoken,
        _drafter(config, spoken),
        _length(config, "ngram_size_m" if spoken == "ngram" else "draft_n_max"),
        getattr(config, "draft_p_min", 0.0) if spoken != "ngram" else 0.0,
    )


def _speculation(config: Any) -> str:
    kind = getattr(config, "spec_type", None)
    if kind is None:
        raise OptionError(
            f"speculative is {config!r}; expected an object with a spec_type, as SpecConfig has",
            hint='SpecConfig(spec_type=SpeculativeType.DRAFT_MTP) of draftwood, or speculation="mtp"',
        )
    if isinstance(kind, enum.Enum):
        kind = kind.value if isinstance(kind.value, str) else kind.name
    name = str(kind).lower().replace("_", "-")
    spoken = _SPOKEN.get(name.removeprefix("draft-"))
    if spoken is None:
        raise UnsupportedError(
            f"found spec_type {name!r}; expected one of none, draft-mtp, draft-dflash, ngram-simple, "
            "ngram-map-k, ngram-map-k4v",
            hint='speculation="auto" drafts with what the model has, "ngram" with any model',
        )
    return spoken


def _drafter(config: Any, spoken: str) -> str | None:
    path: str | None = getattr(config, "draft_model_path", None)
    if spoken == "dflash" and path is None:
        raise OptionError(
            "found spec_type 'draft-dflash' without draft_model_path; expected the path of its GGUF",
            hint="SpecConfig(spec_type=SpeculativeType.DRAFT_DFLASH, draft_model_path=path)",
        )
    if spoken != "dflash" and path is not None:
        raise UnsupportedError(
            f"found draft_model_path={path!r} for speculation={spoken!r}, which takes none; expected a "
            "DFlash drafter's, or an MTP block in the model's own file",
            hint="leave draft_model_path out, or spec_type=SpeculativeType.DRAFT_DFLASH",
        )
    return path


def _length(config: Any, name: str) -> int:
    given: Any = getattr(config, name, getattr(SpecConfig, name))
    length = as_int(given)
    if length is None or not 1 <= length <= MAX_DRAFT_TOKENS:
        raise OptionError(
            f"{name} is {given!r}; expected 1 to {MAX_DRAFT_TOKENS} tokens",
            hint="spec_type=SpeculativeType.NONE turns drafting off",
        )
    return length


def _warn_of_ignored_fields(config: Any) -> None:
    missing = object()
    given = {name: getattr(config, name, missing) for name in _WITHOUT_EFFECT}
    names = [n for n, value in given.items() if value is not missing and value != _WITHOUT_EFFECT[n]]
    if names:
        warn(f"fields of speculative= without effect in draftwood: {', '.join(names)} (docs/speculation.md)")
