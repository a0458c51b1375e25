"""bench/many_cards.py: ways to spread a model, here on a CPU: what cells say, and some that die or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import many_cards

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
UNSAFE = {key: text for key, text in os.environ.items() if key != "PYTHONSAFEPATH"}


# many_cards.py whose processes may be silent for minutes: on a loaded machine a load takes its time
PATIENT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import many_cards
many_cards.CELL_SECONDS = many_cards.RPC_SECONDS = 240
many_cards.main()
"""


@pytest.mark.timeout(900)
def test_every_way_of_a_machine(tmp_path):
    results = tmp_path / "rows.json"
    command = [sys.executable, "-c", PATIENT, str(ROOT / "bench"), "--model", TINY]
    done = subprocess.run(
        [*command, "--seconds", "800", "--way-seconds", "400", "--tokens", "32", "--results", str(results)],
        capture_output=True, text=True, timeout=850, check=False, env=UNSAFE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(results.read_text())
    assert row == json.loads(done.stdout.splitlines()[-1])
    assert {"commit", "cards", "pin", "bytes"} <= set(row)
    cells = {(each["way"], each["mode"]): each for each in row["cells"]}
    assert set(cells) == {(way, mode) for way in many_cards.WAYS for mode in many_cards.MODES}
    for mode in many_cards.MODES:
        ran = cells["one", mode]
        assert ran["tok_s"] > 0
        assert ran["differs_at"] is None
        assert (ran["drafted"] + ran["paused_rounds"] > 0) == (mode != "off")  # "auto" may well pause
    assert cells["one", "tree"]["tree_rounds"] > 0
    assert cells["rpc", "tree"]["drafted"] > 0
    assert "snapshots" in cells["rpc", "tree"]["tree_refusal"]
    if not row["cards"]:
        assert "found no card" in cells["tensor", "off"]["refused"]
    assert str(ROOT) not in json.dumps(row), "no path of this machine"


def test_it_starts_as_on_a_card_machine():
    script = [sys.executable, str(ROOT / "bench" / "many_cards.py"), "--help"]
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}  # tools/gpu.sh run: the script's folder is not searched
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=safe)
    assert done.returncode == 0, done.stderr
    assert "--way-seconds" in done.stdout


STAND_IN = """
import json, os, sys, time
job = json.loads(sys.argv[2])
for mode in job["modes"]:
    if mode == "off":
        sys.stderr.write("an assert failed\\n")
        sys.stderr.flush()
        os.abort()
    if mode == "auto":
        time.sleep(600)
    print(json.dumps({"mode": mode, "tokens": [1]}), flush=True)
"""


@pytest.mark.parametrize("seconds", [240, 0])
def test_a_mode_that_dies_or_hangs_leaves_the_others(tmp_path, monkeypatch, seconds):
    script = tmp_path / "worker.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(many_cards, "__file__", str(script))
    monkeypatch.setattr(many_cards, "CELL_SECONDS", 120)  # a busy machine may take long to start a process
    begin, cells = time.monotonic(), {}
    for each in many_cards.run_way({}, "", 8, begin + seconds, 0):
        cells[each["mode"]] = each
        if each["mode"] == "tree":  # "auto", which hangs, comes next in the same process
            monkeypatch.setattr(many_cards, "CELL_SECONDS", 1)
    assert set(cells) == set(many_cards.MODES)
    assert time.monotonic() - begin < 100, "nobody waited for the one that hangs"
    if seconds == 0:
        assert {each["refused"] for each in cells.values()} == {"not run: no time was left"}
        return
    assert cells["mtp"]["tokens"] == cells["tree"]["tokens"] == [1]
    assert cells["off"] == {
        "mode": "off",
        "refused": "the process ended with status -6",
        "log": "an assert failed",
    }
    assert cells["auto"]["refused"] == "no answer in time"


def test_where_texts_differ():
    assert many_cards.differs_at([1, 2, 3], [1, 2, 3]) is None
    assert many_cards.differs_at([1, 2, 3], [1, 4, 3]) == 1
    assert many_cards.differs_at([1, 2], [1, 2, 3]) == 2
