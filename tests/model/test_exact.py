"""A short run of `make exact`: text is the same with drafting, and the checker notices a wrong token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXACT = ROOT / "bench" / "exact.py"


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [str(EXACT)] if code is None else ["-c", code]
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
    ("name", "tokens"),
    [
        ("tiny-moe-F16", "16"),
        pytest.param("tiny-moe-Q4_K_M", "16", marks=pytest.mark.slow),
        ("planted-dense", "40"),
    ],
)
def test_text_is_the_same(name, tokens):
    done = run("--only", name, "--tokens", tokens, "--threads", "1")
    assert done.returncode in (0, 1), done.stderr
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
