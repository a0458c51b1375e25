"""Which speculation runs: each refusal, in words, without any model."""

from dataclasses import asdict, dataclass

import numpy as np
import pytest
from draftwood.errors import OptionError, UnsupportedError
from draftwood.options import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_TREE_BUDGET,
    Options,
    default_draft_tokens,
    fitted,
    needed_batch,
    plan,
)


@dataclass
class Info:
    architecture: str = "qwen35moe"
    n_layer_nextn: int = 1
    can_draft_mtp: bool = True


def test_defaults():
    options = Options()
    assert (options.speculation, options.draft_tokens, options.draft_p_min, options.exact) == (
        "auto",
        DEFAULT_DRAFT_TOKENS,
        0.0,
        True,
    )


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"speculation": "trees"}, "speculation is 'trees'; expected one of 'auto', 'off', 'mtp'"),
        ({"speculation": "MTP"}, "speculation is 'MTP'"),
        ({"speculation": None}, "speculation is None"),
        ({"speculation": False}, "speculation is False"),
        ({"speculation": []}, r"speculation is \[\]"),
        ({"draft_tokens": 0}, "draft_tokens is 0; expected 1 to 63"),
        ({"draft_tokens": -1}, "draft_tokens is -1; expected 1 to 63"),
        ({"draft_tokens": 64}, "draft_tokens is 64; expected 1 to 63"),
        ({"draft_tokens": "3"}, "draft_tokens is '3'; expected a whole number"),
        ({"draft_tokens": True}, "draft_tokens is True; expected a whole number"),
        ({"draft_tokens": 2.5}, "draft_tokens is 2.5; expected a whole number"),
        ({"draft_tokens": None}, "draft_tokens is None; expected a whole number"),
        ({"draft_p_min": float("nan")}, "draft_p_min is nan; expected a probability from 0 to 1"),
        ({"draft_p_min": float("inf")}, "draft_p_min is inf"),
        ({"draft_p_min": -1}, "draft_p_min is -1"),
        ({"draft_p_min": 2}, "draft_p_min is 2"),
        ({"draft_p_min": True}, "draft_p_min is True"),
        ({"draft_p_min": "0.5"}, "draft_p_min is '0.5'"),
        ({"draft_p_min": None}, "draft_p_min is None"),
        ({"draft_vocab": 0}, "draft_vocab is 0; expected 64 to 2147483647 tokens"),
        ({"draft_vocab": 63}, "draft_vocab is 63"),
        ({"draft_vocab": -1}, "draft_vocab is -1"),
        ({"draft_vocab": 1 << 31}, "draft_vocab is 2147483648"),
        ({"draft_vocab": True}, "draft_vocab is True"),
        ({"draft_vocab": 512.0}, "draft_vocab is 512.0"),
        ({"draft_vocab": "512"}, "draft_vocab is '512'"),
        ({"tree_budget": 0}, "tree_budget is 0; expected 1 to 64 nodes"),
        ({"tree_budget": -1}, "tree_budget is -1; expected 1 to 64 nodes"),
        ({"tree_budget": 65}, "tree_budget is 65; expected 1 to 64 nodes"),
        ({"tree_budget": True}, "tree_budget is True; expected 1 to 64 nodes"),
        ({"tree_budget": "8"}, "tree_budget is '8'; expected 1 to 64 nodes"),
        ({"tree_budget": 8.0}, "tree_budget is 8.0; expected 1 to 64 nodes"),
        ({"tree_budget": 8, "speculation": "off"}, 'found tree_budget=8 beside speculation="off"'),
        *(
            ({"drafter": "d.gguf", "speculation": each}, f'found a drafter= beside speculation="{each}"')
            for each in ("mtp", "ngram")
        ),
        ({"exact": "no"}, "exact is 'no'; expected True or False"),
        ({"exact": None}, "exact is None; expected True or False"),
    ],
)
def test_options_that_make_no_sense(settings, found):
    with pytest.raises(OptionError, match=found):
        Options(**settings)


def test_values_of_numpys_types_become_pythons():
    """A bool of NumPy's is no JSON value; 1 for True made other names of the times that "auto" keeps."""
    given = {"draft_tokens": 4, "checkpoint_bytes": 1 << 20, "tree_budget": 8, "draft_vocab": 64}
    options = Options(
        exact=np.bool_(True), draft_p_min=np.float32(0.5), **{n: np.int64(v) for n, v in given.items()}
    )
    found = asdict(options)
    assert found == {**asdict(Options(exact=True, draft_p_min=0.5)), **given}
    assert [type(found[name]) for name in ("exact", "draft_p_min", *given)] == [bool, float, *[int] * 4]
    assert type(Options(exact=1).exact) is bool
    assert Options(exact=0).exact is False


@pytest.mark.parametrize(
    ("wish", "hint"),
    [
        ("mpt", 'did you mean speculation="mtp"?'),
        ("MTP", 'did you mean speculation="mtp"?'),
        ("dflsh", 'did you mean speculation="dflash"?'),
        ("trees", 'did you mean speculation="tree"?'),
        (False, 'speculation="auto" drafts where it can, "off" not at all'),
        (None, 'speculation="auto" drafts where it can, "off" not at all'),
    ],
)
def test_what_a_misspelt_speculation_may_mean(wish, hint):
    with pytest.raises(OptionError) as caught:
        Options(speculation=wish)
    assert caught.value.hint == hint


@pytest.mark.parametrize("draft_tokens", [1, 63])
@pytest.mark.parametrize("draft_p_min", [0, 0.0, 0.5, 1, 1.0])
def test_limits_are_allowed(draft_tokens, draft_p_min):
    Options("mtp", draft_tokens, draft_p_min, False)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("speculation", ["auto", "mtp"])
def test_a_file_with_mtp_drafts(architecture, speculation):
    chosen = plan(Options(speculation, 7), Info(architecture), {})
    assert (chosen.drafter, chosen.reason, chosen.n_rs_seq) == ("mtp", "", 0)


@pytest.mark.parametrize(
    ("without_tree_ops", "arguments", "n_rs_seq"),
    [
        (False, {"n_gpu_layers": -1}, 0),
        (True, {}, 0),
        (True, {"n_gpu_layers": 0}, 0),
        (True, {"n_gpu_layers": 1}, 7),
        (True, {"n_gpu_layers": -1}, 7),
    ],
)
def test_snapshots_only_where_the_tree_ops_may_not_run(without_tree_ops, arguments, n_rs_seq):
    assert plan(Options("mtp", 7), Info(), arguments, without_tree_ops=without_tree_ops).n_rs_seq == n_rs_seq


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({"speculation": "tree"}, DEFAULT_TREE_BUDGET),
        ({"speculation": "tree", "drafter": "d.gguf"}, DEFAULT_TREE_BUDGET),
        ({"speculation": "auto"}, DEFAULT_TREE_BUDGET),
        ({"speculation": "mtp"}, 0),
        ({"speculation": "dflash", "drafter": "d.gguf"}, 0),
        ({"speculation": "ngram"}, 0),
        *(({"speculation": s, "tree_budget": n}, n) for s in ("tree", "auto", "mtp") for n in (2, 64)),
        ({"speculation": "dflash", "drafter": "d.gguf", "tree_budget": 5}, 5),
        ({"speculation": "off"}, 0),
    ],
)
def test_who_branches_and_in_how_many_rows(settings, budget):
    assert plan(Options(**settings), Info(), {}).tree_budget == budget


@pytest.mark.parametrize("speculation", ["auto", "mtp", "tree"])
def test_a_budget_of_one_row_drafts_nothing_and_says_so(speculation):
    chosen = plan(Options(speculation, tree_budget=1), Info(), {})
    assert chosen.drafter == "none"
    assert "tree_budget=1" in chosen.reason


@pytest.mark.parametrize(
    ("speculation", "tree_budget", "where", "expected"),
    [
        ("mtp", None, {}, 4),
        ("mtp", None, {"on_cpu": True}, 2),
        ("mtp", 16, {"on_cpu": True}, 8),
        ("dflash", None, {"on_cpu": True}, 4),
        ("ngram", None, {"on_cpu": True}, 4),
        ("auto", None, {"on_cpu": True}, 8),
        ("auto", None, {"given": True, "on_cpu": True}, 16),
    ],
)
def test_the_longest_draft_where_nobody_says(speculation, tree_budget, where, expected):
    assert default_draft_tokens(speculation, tree_budget, **where) == expected


def test_a_default_budget_holds_the_longest_draft():
    assert plan(Options(draft_tokens=20), Info(), {}).tree_budget == 21
    assert plan(Options(draft_tokens=63), Info(), {}).tree_budget == 64


def test_a_tree_fits_its_batch():
    chosen = plan(Options("tree", tree_budget=48), Info(), {})
    assert fitted(chosen, 10).tree_budget == 10
    for n_batch in (48, 4096):
        assert fitted(chosen, n_batch) == chosen


def test_trees_are_drafted_by_the_drafter_or_the_block():
    assert plan(Options("tree"), Info(), {}).drafter == "mtp"
    assert plan(Options("tree", drafter="d.gguf"), Info(n_layer_nextn=0), {}).drafter == "dflash"
    with pytest.raises(UnsupportedError, match="speculation='tree' cannot run: found no MTP block"):
        plan(Options("tree"), Info(n_layer_nextn=0), {})
    with pytest.raises(UnsupportedError, match="found architecture 'llama'"):
        plan(Options("tree", drafter="d.gguf"), Info("llama", 0, False), {})
    assert plan(Options("auto", tree_budget=8), Info(n_layer_nextn=0), {}).tree_budget == 0


def test_ngram_needs_no_block():
    for architecture in ("qwen35moe", "llama"):
        chosen = plan(Options("ngram"), Info(architecture, 0, False), {})
        assert (chosen.drafter, chosen.reason, chosen.n_rs_seq) == ("ngram", "", 0)
    on_gpu = plan(Options("ngram", 5), Info("qwen35moe"), {"n_gpu_layers": -1}, without_tree_ops=True)
    assert on_gpu.n_rs_seq == 5
    with pytest.raises(UnsupportedError, match="embedding=True"):
        plan(Options("ngram"), Info(), {"embedding": True})


def test_off_is_off():
    chosen = plan(Options("off"), Info(), {})
    assert (chosen.drafter, chosen.n_rs_seq) == ("none", 0)
    assert "off" in chosen.reason


@pytest.mark.parametrize(
    ("info", "arguments", "found"),
    [
        (Info("llama", 0, False), {}, "found architecture 'llama'"),
        (Info("qwen3next", 1, False), {}, "MTP drafting works for 'qwen35' and 'qwen35moe'"),
        (Info("", 0, False), {}, "found architecture ''"),
        (Info(n_layer_nextn=0, can_draft_mtp=False), {}, "found no MTP block in the file"),
        (Info(n_layer_nextn=2, can_draft_mtp=False), {}, "found 2 MTP layers"),
        (Info(), {"embedding": True}, "embedding=True"),
        (Info(), {"split_mode": 3, "n_gpu_layers": -1}, "llama.cpp keeps one graph"),
        (Info(), {"vocab_only": True}, "vocab_only=True"),
    ],
)
def test_what_cannot_draft(info, arguments, found):
    """Asked for, it is refused; with "auto" the same words are the reason."""
    with pytest.raises(UnsupportedError, match=found) as caught:
        plan(Options("mtp"), info, arguments)
    assert "speculation='mtp' cannot run" in str(caught.value)
    assert "speculation=" in caught.value.hint
    chosen = plan(Options("auto"), info, arguments)
    assert (chosen.drafter, chosen.n_rs_seq) == ("none", 0)
    assert found in chosen.reason


def test_hints_name_what_drafts_instead():
    def hint(options, info, arguments=None):
        with pytest.raises(UnsupportedError) as caught:
            plan(options, info, arguments or {})
        return caught.value.hint

    without, other = Info(n_layer_nextn=0, can_draft_mtp=False), Info("llama", 0, False)
    ngram = 'speculation="ngram" drafts with any model'
    for wish in ("mtp", "tree"):
        assert hint(Options(wish), without).startswith("drafter=path, if there is a DFlash drafter")
        assert hint(Options(wish), without).endswith(ngram)
        assert hint(Options(wish), other) == ngram
    assert hint(Options("tree", drafter="d.gguf"), other) == ngram
    assert 'speculation="auto"' in hint(Options("ngram"), Info(), {"embedding": True})
    assert "split_mode=1" in hint(Options("ngram"), Info(), {"split_mode": 3, "n_gpu_layers": -1})


def test_a_draft_model_of_the_callers_own_runs_on_any_model():
    given = {"draft_model": object()}
    for info in (Info(), Info("llama", 0, False)):
        assert plan(Options(), info, given).drafter == "given"
    assert plan(Options("off"), Info(), given).drafter == "none"
    with pytest.raises(OptionError, match="found draft_model= beside speculation='mtp'"):
        plan(Options("mtp"), Info(), given)
    assert plan(Options(), Info(), given).tree_budget == 0
    with pytest.raises(OptionError, match="found draft_model= beside tree_budget=4; expected chains"):
        plan(Options(tree_budget=4), Info(), given)
    with pytest.raises(OptionError, match=r"drafter='d\.gguf'"):
        plan(Options(drafter="d.gguf"), Info(), given)
    assert "embedding=True" in plan(Options(), Info(), {**given, "embedding": True}).reason


@pytest.mark.parametrize("size", [-1, 1.5, "1GiB", None, True, 1 << 63])
def test_checkpoint_bytes_that_make_no_sense(size):
    with pytest.raises(OptionError, match=r"checkpoint_bytes is .*; expected a number of bytes"):
        Options(checkpoint_bytes=size)


@pytest.mark.parametrize("arguments", [{"embedding": False}, {"vocab_only": False}, {"draft_model": None}])
def test_what_is_left_off_hinders_nothing(arguments):
    assert plan(Options("mtp"), Info(), arguments).drafter == "mtp"


@pytest.mark.parametrize("draft_tokens", [1, 3, 63])
def test_batch_of_a_draft(draft_tokens):
    least = draft_tokens + 2
    assert needed_batch(draft_tokens, 0) == needed_batch(draft_tokens, 1) == least
    assert needed_batch(draft_tokens, 64) == max(least, 64)
