"""`make demo` runs and reports: the same text, and as many tokens a round as its card promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
def test_demo_reports(tmp_path):
    report = tmp_path / "demo.json"
    command = [sys.executable, str(ROOT / "bench" / "demo.py"), "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text("utf-8"))
    assert found["same_text"] is True
    assert found["mean_length"] >= 2.1  # of 3 at most; a busy machine does not change it
    assert found["plain_tps"] > 0
    assert found["spec_tps"] > 0
    assert "same text" in done.stdout.splitlines()[-1]
