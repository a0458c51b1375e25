"""speculation="auto": times kept between loads, and models that load without their drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import gguf as gguf_py
import numpy as np
import pytest
from draftwood import Llama
from draftwood.engine import curves
from draftwood.errors import DrafterMemoryError

from tests.model.rig import PROMPT
from tests.model.test_dflash import DRAFTER, copy_keys

# times what was measured: no load makes a machine so slow, and true times come so near on any
FAR, NEAR = 1000, 50
MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWOOD_CURVES", str(tmp_path / "curves"))
    monkeypatch.setattr(curves, "_of_this_process", {})
    return tmp_path / "curves"


def text(llm, n=60):
    llm.reset()
    return list(islice(llm.generate(list(PROMPT), temp=0.0), n))


def saved(folder):
    (path,) = folder.glob("*.json")
    return path, json.loads(path.read_text())


def test_times_are_measured_once(llama, folder, monkeypatch):
    first = llama()
    path, times = saved(folder)
    assert times["verify_us"][1] > 0
    assert times["draft_us"][8] > 0, "the longest draft is measured at load"
    first.close()

    times["verify_us"][1] = 123456.0
    path.write_text(json.dumps(times))
    monkeypatch.setattr(curves, "_of_this_process", {})
    second = llama()
    assert second._engine.curve().verify_us[1] == 123456.0, "read, not measured"
    text(second)
    second.close()
    assert saved(folder)[1] != times, "what a single request learned stays"


def test_times_are_of_these_settings(llama, folder):
    llama()
    llama(n_threads=2)
    llama(draft_tokens=2)
    llama("moe-mtp")
    assert len(list(folder.glob("*.json"))) == 4


@pytest.mark.parametrize(("draft_us", "drafts"), [(1e4, True), (1e12, False)])
def test_they_decide(llama, folder, monkeypatch, draft_us, drafts):
    llama().close()
    set_times(folder, monkeypatch, draft_us)
    llm = llama()
    assert text(llm) == text(llama(speculation="off"))
    stats = llm.speculation_stats
    assert stats.drafted > 60 if drafts else stats.paused_rounds > 40


def set_times(folder, monkeypatch, draft_us):
    """A second a verify: longer than it takes on a busy machine, or the true times would replace it."""
    path, times = saved(folder)
    times["draft_us"] = [draft_us * n for n in range(65)]
    times["verify_us"] = [0.0] + [1e6 + 1000 * n for n in range(64)]
    path.write_text(json.dumps(times))
    monkeypatch.setattr(curves, "_of_this_process", {})


def test_ngrams_where_the_drafter_does_not_pay(folder, monkeypatch):
    """A text with repeats: what costs nothing drafts, the drafter is tried now and then."""
    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    path = str(MODELS / "tiny-moe-f16.gguf")
    Llama(path, **settings).close()
    set_times(folder, monkeypatch, draft_us=1e9)
    llm, off = Llama(path, **settings), Llama(path, speculation="off", **settings)
    prompt = llm.tokenize(b'{"name": "one", "value": 1},\n{"name": "two", "value": 2},\n' * 3)
    expected, found = (list(islice(each.generate(prompt, temp=0.0), 150)) for each in (off, llm))
    assert found == expected
    stats = llm.speculation_stats
    assert stats.ngram_rounds > 10
    assert stats.accepted > stats.ngram_rounds
    llm.close()
    off.close()


def test_times_of_a_busy_machine_do_not_stay(folder, monkeypatch):
    """Kept times that are far too long: one request shows it, and sizes that it did not try follow."""
    settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    path = str(MODELS / "tiny-moe-f16.gguf")
    Llama(path, **settings).close()
    file, times = saved(folder)
    true = {name: list(values) for name, values in times.items()}
    file.write_text(json.dumps({name: [FAR * us for us in values] for name, values in times.items()}))
    monkeypatch.setattr(curves, "_of_this_process", {})
    llm = Llama(path, **settings)
    list(islice(llm.generate(list(PROMPT), temp=0.0), 60))
    found = llm._engine.curve()
    assert found.verify_us[1] < NEAR * true["verify_us"][1]
    assert found.verify_us[9] < NEAR * true["verify_us"][9]
    assert found.draft_us[8] < NEAR * true["draft_us"][8]
    llm.close()


def test_a_machine_that_got_busy_is_noticed_within_a_request(folder, monkeypatch):
    """Verifies take far more than they did, as where others have the cores; then they do not any more."""
    settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    path = str(MODELS / "tiny-moe-f16.gguf")
    Llama(path, **settings).close()
    file, times = saved(folder)
    plain, *rows = times["verify_us"][1:]
    for then in (1 / FAR, FAR):
        file.write_text(json.dumps({**times, "verify_us": [0, plain, *(then * us for us in rows)]}))
        monkeypatch.setattr(curves, "_of_this_process", {})
        llm = Llama(path, **settings)
        list(islice(llm.generate(list(PROMPT), temp=0.0), 200))
        list(islice(llm.generate(list(PROMPT), temp=0.0), 2))
        found = llm._engine.curve().verify_us
        assert plain / NEAR < found[1] < NEAR * plain
        assert rows[7] / NEAR < found[9] < NEAR * rows[7]  # of 9 rows
        if then > 1:
            assert llm.speculation_stats.paused_rounds > 20
        llm.close()


@pytest.mark.parametrize("end", ["", "llm.close()", "del llm"])
def test_times_that_requests_showed_are_kept(folder, end):
    """Also by a program that ends without close(), whose Llama is a global."""
    script = f"""
from itertools import islice
from draftwood import Llama
llm = Llama({str(MODELS / "tiny-moe-f16.gguf")!r}, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
list(islice(llm.generate({list(PROMPT)}, temp=0.0), 60))
{end}
"""
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    file, times = saved(folder)
    file.write_text(json.dumps({name: [FAR * us for us in values] for name, values in times.items()}))
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    assert saved(folder)[1]["verify_us"][1] < NEAR * times["verify_us"][1]


def test_a_folder_that_cannot_be_written(llama, folder):
    folder.write_text("in the way")
    assert text(llama()) == text(llama(speculation="off"))
    assert folder.read_text() == "in the way"


@pytest.fixture
def huge(tmp_path):
    """A drafter whose header announces a tensor larger than any machine's memory; on disk it is a hole."""
    path = tmp_path / "huge.gguf"
    writer = gguf_py.GGUFWriter(path, "dflash")
    copy_keys(gguf_py.GGUFReader(DRAFTER), writer)
    writer.add_tensor_info("fc.weight", (1 << 18, 1 << 20), np.dtype(np.float32), 1 << 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate((1 << 40) + (1 << 20))  # and the header
    return path


def test_a_drafter_larger_than_memory(huge, folder):
    settings = {"n_ctx": 256, "n_threads": 1, "verbose": False, "drafter": huge}
    target = str(MODELS / "tiny-moe-f16.gguf")
    with pytest.raises(DrafterMemoryError, match=r"takes 1048577 MiB; \d+ MiB of memory"):
        Llama(target, speculation="dflash", **settings)
    with pytest.warns(UserWarning, match="the model was loaded without its drafter"):
        llm = Llama(target, **settings)
    off = Llama(target, n_ctx=256, n_threads=1, verbose=False, speculation="off")
    assert llm.speculation == "off"
    assert "MiB of memory" in llm.speculation_reason
    assert text(llm) == text(off)
    llm.close()
    off.close()
