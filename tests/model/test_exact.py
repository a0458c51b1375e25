"""A short run of `make exact`: text is the same with drafting, and the checker notices a wrong token."""

from __future__ import annotations

import json
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
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.model
@pytest.mark.parametrize("name", ["tiny-moe-F16", "tiny-moe-Q4_K_M", "planted-dense"])
def test_text_is_the_same(name):
    done = run("--only", name, "--tokens", "40")
    assert done.returncode in (0, 1), done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["mismatches"] == 0
    assert verdict["excused"] == 0
    assert verdict["tokens"] >= 300
    assert sum(count for depth, count in verdict["accepted_lengths"].items() if depth != "0") > 0


@pytest.mark.model
def test_a_wrong_token_is_found():
    """With the target's row mixed up (drafts accepted unseen) the verdict is not 0."""
    sabotage = (
        "import sys; sys.path.insert(0, 'bench')\n"
        "sys.argv = ['exact.py', '--only', 'planted-dense', '--tokens', '40']\n"
        "import exact\n"
        "honest = exact.Llama._rounds\n"
        "def lying(self, *given):\n"
        "    for i, token in enumerate(honest(self, *given)):\n"
        "        yield (token + 1) % 256 if self.speculation == 'mtp' and i == 7 else token\n"
        "exact.Llama._rounds = lying\n"
        "sys.exit(exact.main())\n"
    )
    done = run(code=sabotage)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["mismatches"] > 0
