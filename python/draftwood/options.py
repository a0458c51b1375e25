"""Which speculation a `Llama` runs: the user's wish held against what the model file can do.

Pure decisions, no library calls, so each refusal is a unit test (tests/unit/test_options.py).
"""

from __future__ import annotations

import difflib
import numbers
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftwood.coerce import as_bool, as_int
from draftwood.errors import OptionError, UnsupportedError

Drafter = Literal["none", "mtp", "dflash", "ngram", "given"]
Speculation = Literal["auto", "off", "mtp", "dflash", "ngram", "tree"]

SPECULATIONS: tuple[str, ...] = ("auto", "off", "mtp", "dflash", "ngram", "tree")
HYBRID_ARCHITECTURES = ("qwen35", "qwen35moe")
DEFAULT_DRAFT_TOKENS = 4
CPU_DRAFT_TOKENS = 2  # of MTP on a CPU, where each further row of a verify costs more
GIVEN_DRAFT_TOKENS = 16  # where the caller's own draft_model says how long drafts are
TREE_DRAFT_TOKENS = 8  # longest path of a tree, and most that "auto" chooses
MAX_DRAFT_TOKENS = 63
DEFAULT_TREE_BUDGET = 16
MAX_TREE_BUDGET = 64
DEFAULT_DRAFT_P_MIN = 0.0
MIN_DRAFT_VOCAB = 64
MAX_DRAFT_VOCAB = (1 << 31) - 1
DEFAULT_CHECKPOINT_BYTES = 512 << 20
EXACT_ROWS = (1 << 31) - 1  # batches of any size


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked in itself."""

    speculation: Speculation = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    """Longest draft of a round, tokens."""
    draft_p_min: float = DEFAULT_DRAFT_P_MIN
    """A draft ends where the drafter gives its path less than this probability."""
    exact: bool = True
    """Run on CPU kernels whose rows do not depend on each other's number."""
    drafter: str | None = None
    """Path of a DFlash drafter's GGUF."""
    checkpoint_bytes: int = DEFAULT_CHECKPOINT_BYTES
    """Host memory for copies of recurrent state that later prompts go back to; 0 keeps none."""
    tree_budget: int | None = None
    """Rows of a verify where drafts are trees, the newest token's included; None: as `speculation` has it."""
    draft_vocab: int | None = None
    """Tokens that drafts are chosen from. None: on a CPU an eighth of a vocabulary of at least 2048 tokens;
    on a card, for MTP, a quarter of one of at least 1024; else all of it."""

    def __post_init__(self) -> None:
        if self.speculation not in SPECULATIONS:
            raise OptionError(
                f"speculation is {self.speculation!r}; expected one of {', '.join(map(repr, SPECULATIONS))}",
                hint=_meant(self.speculation),
            )
        checked = {
            "draft_tokens": _checked_draft_tokens(self.draft_tokens),
            "draft_p_min": _checked_p_min(self.draft_p_min),
            "exact": _checked_exact(self.exact),
            "checkpoint_bytes": _checked_bytes(self.checkpoint_bytes),
            "tree_budget": _checked_tree_budget(self.tree_budget),
            "draft_vocab": _checked_draft_vocab(self.draft_vocab),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # frozen
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Refuse options that do not go with each other."""
        if self.speculation == "off" and self.tree_budget is not None:
            raise OptionError(
                f'found tree_budget={self.tree_budget} beside speculation="off"; expected a drafter',
                hint="leave one of them out",
            )
        if self.speculation == "dflash" and self.drafter is None:
            raise OptionError(
                'found speculation="dflash" without a drafter; expected the path of its GGUF',
                hint="drafter=path",
            )
        if self.drafter is not None and self.speculation in ("mtp", "ngram"):
            raise OptionError(
                f'found a drafter= beside speculation="{self.speculation}", which takes none',
                hint='leave one of them out, or speculation="off" for none',
            )


def _checked_draft_tokens(value: Any) -> int:
    number = as_int(value)
    if number is None:
        raise OptionError(
            f"draft_tokens is {value!r}; expected a whole number",
            hint=f"draft_tokens={DEFAULT_DRAFT_TOKENS}, or leave it out",
        )
    if not 1 <= number <= MAX_DRAFT_TOKENS:
        raise OptionError(
            f"draft_tokens is {number}; expected 1 to {MAX_DRAFT_TOKENS}",
            hint='speculation="off" turns drafting off',
        )
    return number


def _checked_p_min(value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:
        raise OptionError(
            f"draft_p_min is {value!r}; expected a probability from 0 to 1",
            hint="draft_p_min=0.0, the default, ends no draft early",
        )
    return float(value)


def _checked_exact(value: Any) -> bool:
    exact = as_bool(value)
    if exact is None:
        raise OptionError(
            f"exact is {value!r}; expected True or False",
            hint="exact=False takes llama.cpp's stock kernels; True is the default",
        )
    return exact


def _checked_bytes(value: Any) -> int:
    size = as_int(value)
    if size is None or not 0 <= size < 1 << 63:
        raise OptionError(
            f"checkpoint_bytes is {value!r}; expected a number of bytes, 0 or more",
            hint="checkpoint_bytes=256 << 20",
        )
    return size


def _checked_tree_budget(value: Any) -> int | None:
    budget = as_int(value)
    if value is not None and (budget is None or not 1 <= budget <= MAX_TREE_BUDGET):
        raise OptionError(
            f"tree_budget is {value!r}; expected 1 to {MAX_TREE_BUDGET} nodes, the newest token's included",
            hint="leave it out for the default",
        )
    return budget


def _checked_draft_vocab(value: Any) -> int | None:
    size = as_int(value)
    if value is not None and (size is None or not MIN_DRAFT_VOCAB <= size <= MAX_DRAFT_VOCAB):
        raise OptionError(
            f"draft_vocab is {value!r}; expected {MIN_DRAFT_VOCAB} to {MAX_DRAFT_VOCAB} tokens",
            hint="leave it out for an eighth of the vocabulary, a quarter on a card",
        )
    return size


def _meant(speculation: Any) -> str:
    close = difflib.get_close_matches(str(speculation).lower(), SPECULATIONS, 1)
    default = 'speculation="auto" drafts where it can, "off" not at all'
    return f'did you mean speculation="{close[0]}"?' if close else default


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, and why it is not more."""

    drafter: Drafter
    reason: str
    """Why nothing is drafted; empty when a drafter runs."""
    n_rs_seq: int
    """Recurrent snapshots that roll a whole draft back; 0 where a verify leaves the state alone."""
    tree_budget: int = 0
    """Most rows of a verify whose draft is a tree; 0: drafts are chains."""
    queue_steps: bool = False
    """Whether a greedy text's next step is queued before its token is known: the context has room for the
    state of a second sequence."""


TENSOR_SPLIT = 3  # split_mode, LLAMA_SPLIT_MODE_TENSOR

# llama-cpp-python arguments with which a context never generates token by token
_NO_GENERATION = ("embedding", "vocab_only")


def default_draft_tokens(
    speculation: str, tree_budget: int | None, *, given: bool = False, on_cpu: bool = False
) -> int:
    """Return the longest draft by default.

    given: a draft_model drafts. on_cpu: no layer is on a card.
    """
    if given:
        return GIVEN_DRAFT_TOKENS
    if speculation in ("auto", "tree") or tree_budget is not None:
        return TREE_DRAFT_TOKENS
    return CPU_DRAFT_TOKENS if on_cpu and speculation == "mtp" else DEFAULT_DRAFT_TOKENS


def plan(options: Options, info: Any, arguments: dict[str, Any], *, without_tree_ops: bool = False) -> Plan:
    """Decide what runs for a model file (`engine.ModelInfo`) and llama-cpp-python's own `arguments`.

    without_tree_ops tells whether layers can land on a device that does not run the tree ops.

    Errors: OptionError or UnsupportedError if the user asked for a drafter that cannot run; with "auto" the
    same reason is kept in the plan instead.
    """
    if options.speculation == "off":
        return _without('speculation="off"')

    drafter = _drafter(options, arguments)
    refusal = _refusal_of_any(arguments)
    if refusal is None and drafter in _REFUSALS:
        refusal = _REFUSALS[drafter](info)
    if refusal is None and options.tree_budget == 1:
        return _without("tree_budget=1 is the newest token's row alone")
    if refusal is None:
        has_ops = not without_tree_ops or arguments.get("n_gpu_layers", 0) == 0
        keeps_state = has_ops or info.architecture not in HYBRID_ARCHITECTURES
        return Plan(drafter, "", 0 if keeps_state else options.draft_tokens, _budget(options, drafter))
    if options.speculation == "auto":
        return _without(refusal)
    raise UnsupportedError(
        f"speculation={options.speculation!r} cannot run: {refusal}",
        hint=_instead(drafter, info, arguments),
    )


def _instead(refused: Drafter, info: Any, arguments: dict[str, Any]) -> str:
    """Say what drafts where `refused` does not, by names that `draftwood tree` knows, too."""
    if _splits_tensors(arguments):
        return 'split_mode=1 splits by layers, and drafts; speculation="off" decodes plainly'
    if _refusal_of_any(arguments) is not None:
        return 'speculation="auto" drafts where it can and decodes plainly elsewhere'
    ngram = 'speculation="ngram" drafts with any model'
    if refused == "mtp" and info.architecture in HYBRID_ARCHITECTURES:
        return f"drafter=path, if there is a DFlash drafter for this model; {ngram}"
    return ngram


def _budget(options: Options, drafter: Drafter) -> int:
    if options.tree_budget is not None:
        return options.tree_budget
    branches = drafter in ("mtp", "dflash") and options.speculation in ("auto", "tree")
    # a whole chain of the longest draft is a tree, too
    return min(max(DEFAULT_TREE_BUDGET, options.draft_tokens + 1), MAX_TREE_BUDGET) if branches else 0


def _drafter(options: Options, arguments: dict[str, Any]) -> Drafter:
    if arguments.get("draft_model") is not None:
        if options.speculation != "auto" or options.drafter is not None:
            raise OptionError(
                f"found draft_model= beside speculation={options.speculation!r}, "
                f"drafter={options.drafter!r}; expected one way of drafting",
                hint="leave speculation= and drafter= out",
            )
        if options.tree_budget is not None:
            raise OptionError(
                f"found draft_model= beside tree_budget={options.tree_budget}; expected chains from it",
                hint="leave tree_budget= out",
            )
        return "given"
    if options.speculation == "ngram":
        return "ngram"
    return "mtp" if options.drafter is None else "dflash"


def _without(reason: str) -> Plan:
    return Plan("none", reason, 0)


def _splits_tensors(arguments: dict[str, Any]) -> bool:
    return arguments.get("split_mode") == TENSOR_SPLIT and arguments.get("n_gpu_layers", 0) != 0


def _refusal_of_any(arguments: dict[str, Any]) -> str | None:
    for name in _NO_GENERATION:
        if arguments.get(name):
            return f"{name}=True contexts generate no text"
    if _splits_tensors(arguments):
        return f"with split_mode={TENSOR_SPLIT} llama.cpp keeps one graph, and no draft can be verified"
    return None


def _refusal_of_dflash(info: Any) -> str | None:
    if info.architecture not in HYBRID_ARCHITECTURES:
        return (
            f"found architecture {info.architecture!r}; DFlash drafting works for 'qwen35' and 'qwen35moe' "
            "(Qwen3.5/3.6)"
        )
    return None


def _refusal_of_mtp(info: Any) -> str | None:
    if info.architecture not in HYBRID_ARCHITECTURES:
        return (
            f"found architecture {info.architecture!r}; MTP drafting works for 'qwen35' and 'qwen35moe' "
            "(Qwen3.5/3.6)"
        )
    if info.n_layer_nextn == 0:
        return (
            "found no MTP block in the file (nextn_predict_layers is 0); expected a GGUF converted with its "
            "MTP layers"
        )
    if not info.can_draft_mtp:
        return (
            f"found {info.n_layer_nextn} MTP layers that this llama.cpp cannot run; expected exactly 1 with "
            "nextn.eh_proj, enorm and hnorm beside a full trunk"
        )
    return None


_REFUSALS = {"mtp": _refusal_of_mtp, "dflash": _refusal_of_dflash}  # the others run on any model


def needed_batch(draft_tokens: int, tree_budget: int) -> int:
    """Return the smallest n_batch (= n_ubatch) in which a draft fits.

    A verify has draft_tokens + 1 rows, or as many as a tree may have nodes; with n_rs_seq snapshots llama.cpp
    wants n_ubatch > n_rs_seq + 1.
    """
    return max(draft_tokens + 2, tree_budget)


def fitted(planned: Plan, n_batch: int) -> Plan:
    """Return the plan with trees that fit batches of n_batch rows."""
    return replace(planned, tree_budget=min(planned.tree_budget, n_batch))


def is_one_of_several(path: str) -> bool:
    """Tell whether a file of this name is one of several of a model, as llama.cpp names them."""
    return re.search(r"-\d{5}-of-\d{5}\.gguf$", path) is not None
