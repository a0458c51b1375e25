"""A short run of `make exact`: text is the same with drafting; what is wrong or missing is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXACT = ROOT / "bench" / "exact.py"
TREES = EXACT.with_name("exact_trees.py")
COMMITTED = EXACT.with_name("results") / "exact-trees.json"


def run(*arguments: str, script: Path = EXACT, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [str(script)] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # beside others, spinning threads take minutes
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "tokens", "cache"),
    [
        ("tiny-moe-F16", "16", "F16"),
        pytest.param("tiny-moe-Q4_K_M", "16", "F16", marks=pytest.mark.slow),
        ("planted-dense", "40", "F16"),
        ("planted-dense", "40", "Q8_0"),
    ],
)
def test_text_is_the_same(name, tokens, cache):
    done = run("--only", name, "--tokens", tokens, "--threads", "1", "--cache", cache)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["mismatches"] == 0
    assert verdict["excused"] == 0
    assert verdict["tokens"] >= 300
    assert sum(count for depth, count in verdict["accepted_lengths"].items() if depth != "0") > 0


# drafts accepted unseen; a sampler that only llama-cpp-python's own loop calls
SABOTAGES = {
    "drafting": """
honest = exact.Llama._rounds
def lying(self, *given):
    for i, token in enumerate(honest(self, *given)):
        yield (token + 1) % 256 if self.speculation == 'mtp' and i == 7 else token
exact.Llama._rounds = lying
""",
    "upstream's loop": """
honest = exact.Llama.sample
exact.Llama.sample = lambda self, **given: (honest(self, **given) + (self.n_tokens == 20)) % 256
""",
}


@pytest.mark.model
@pytest.mark.parametrize("where", SABOTAGES)
def test_a_wrong_token_is_found(where):
    start = (
        "import sys; sys.path.insert(0, 'bench')\n"
        "sys.argv = ['exact.py', '--only', 'planted-dense', '--tokens', '40']\n"
        "import exact\n"
    )
    done = run(code=start + SABOTAGES[where] + "sys.exit(exact.main())\n")
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["mismatches"] > 0
    lines = [line.split() for line in done.stdout.splitlines() if " differ " in line]
    wrong = {way: int(differ) for _, way, _, _, differ, *_ in lines}
    assert {way.startswith("loop") for way, differ in wrong.items() if differ} == {where != "drafting"}


@pytest.mark.model
def test_text_is_the_same_with_trees(tmp_path):
    results = tmp_path / "rows.json"
    drafters = ("mtp", "ngram", "oracle")
    asked = ["--only", "planted-dense", "--budgets", "1", "3", "12", "--drafters", *drafters]
    done = run(*asked, "--threads", "1", "--results", str(results), script=TREES)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    rows, verdict = [json.loads(line) for line in lines], json.loads(last)
    (row,), (*_, committed) = (json.loads(path.read_text()) for path in (results, COMMITTED))
    assert set(row) >= set(committed)
    assert set(row["cells"][0]) == set(committed["cells"][0])
    assert row["cells"] == rows
    assert (row["tokens"], row["mismatches"], row["excused"]) == (verdict["tokens"], 0, 0)
    assert row["command"].startswith("python bench/exact_trees.py --only planted-dense --budgets 1 3 12 ")
    cells = [(drafter, budget, t) for drafter in drafters for budget in (1, 3, 12) for t in (0.0, 0.8)]
    assert [(row["drafter"], row["budget"], row["temperature"]) for row in rows] == cells
    assert {row["mismatches"] for row in rows} == {row["excused"] for row in rows} == {0}
    assert all(row["tokens"] >= 50 for row in rows)
    assert all(row["tree_rounds"] > 0 for row in rows if row["budget"] == 12)
    for row in rows:
        assert len(row["note"]) > 0 or row["tree_rounds"] > 0
        if row["drafter"] == "oracle":
            assert list(row["accepted_lengths"]) == [str(n) for n in range(min(9, row["budget"]))]
            assert min(row["accepted_lengths"].values()) >= 5
    assert verdict["tokens"] == sum(row["tokens"] for row in rows)
    assert (verdict["mismatches"], verdict["excused"], verdict["cells"]) == (0, 0, len(cells))


# what is done to exact_trees, and what of it must be told
TREE_SABOTAGES = {
    "an accepted token": (
        """
honest = Oracle._rounds
def lying(self, *given):
    for i, token in enumerate(honest(self, *given)):
        yield (token + 1) % 256 if i == 7 else token
Oracle._rounds = lying
""",
        None,
    ),
    "a token behind a tree": (
        """
honest = Engine.propose_given
def lying(self, last, draft):
    lying.calls += 1
    honest(self, (last + (lying.calls == 30)) % 256, draft)
lying.calls = 0
Engine.propose_given = lying
""",
        None,
    ),
    "a length": (
        """
honest = oracle.random_tree
def lying(dice, last, right, length, *given):
    return honest(dice, last, right, min(length, 2), *given)
oracle.random_tree = lying
""",
        "accepted lengths that did not occur 5 times: 3",
    ),
    "nodes": (
        """
honest = oracle.random_tree
def lying(dice, last, right, length, budget, n_vocab):
    return honest(dice, last, right, length, max(length + 1, budget - 1), n_vocab)
oracle.random_tree = lying
""",
        "accepted lengths that did not occur 5 times: 0, 1, 2",
    ),
    "plain rounds": (
        """
honest = Oracle.plan_trees
def lying(self, plain, n_prompt, lengths, *given, **named):
    honest(self, plain, n_prompt, lengths, *given, **named)
    self._lengths = iter([step for length in lengths for step in (length, *[None] * 19)])
Oracle.plan_trees = lying
""",
        "accepted lengths that did not occur 5 times: 0, 1, 2, 3",
    ),
    "branches": (
        """
Engine.propose_tree = lambda self, tree: self.propose_given(tree.tokens[0], list(tree.tokens[1:]))
""",
        "accepted lengths that did not occur 5 times: ",
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("what", TREE_SABOTAGES)
def test_what_trees_lack_is_found(what):
    sabotage, fault = TREE_SABOTAGES[what]
    start = (
        "import sys; sys.path.insert(0, 'bench')\n"
        "sys.argv = 'exact_trees.py --only planted-dense --budgets 4 --drafters oracle'.split()\n"
        "import exact_trees, oracle\n"
        "from draftwood.engine.engine import Engine\n"
        "Oracle = oracle.TreeOracleLlama\n"
    )
    done = run(code=start + sabotage + "sys.exit(exact_trees.main())\n")
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["mismatches"] > 0) == (fault is None)
    if fault is not None:
        assert f"planted-dense, oracle, 4 nodes, 0.0: {fault}" in done.stdout


@pytest.mark.slow
@pytest.mark.model
def test_the_variants_of_an_installation(tmp_path):
    """A source install has one. Its parts are summed; lengths that so few texts lack are said."""
    from draftwood.load import cpu

    (name,) = cpu.variants()
    results = tmp_path / "rows.json"
    done = run("--only", "planted-dense", "--budget", "2", "--results", str(results),
               script=EXACT.with_name("exact_variants.py"))  # fmt: skip
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(results.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == row
    assert len(row["commit"]) == 40
    for kind in ("chains", "trees"):
        found = row["variants"][name][kind]
        assert (found["mismatches"], found["excused"]) == (0, 0)
        assert found["tokens"] > 1000
    assert [fault.partition(":")[0] for fault in row["faults"]] == [f"{name}, trees"]
    assert "accepted lengths that never occurred: 2, 3, 4" in row["faults"][0]


def test_a_variant_that_does_not_run():
    done = run("--variant", "vax", script=EXACT.with_name("exact_variants.py"))
    assert done.returncode == 2
    assert "vax; expected some of native" in done.stderr
