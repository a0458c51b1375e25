"""What tests on a card leave behind: a row of the run where DRAFTWOOD_GPU_ROWS names a file.

Must not know: any one test.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.gpu.recorder import FIGURES, TEXT, Recorder


def pytest_configure(config):
    path = os.environ.get("DRAFTWOOD_GPU_ROWS")
    if path and not hasattr(config, "workerinput"):  # xdist's workers report to the process that started them
        config.pluginmanager.register(Recorder(Path(path), config), "gpu-rows")


def pytest_runtest_setup(item):
    beside = getattr(item.config, "workerinput", {}).get("workercount", 1) > 1
    if beside and item.get_closest_marker("alone"):
        pytest.skip("measures times or fills the card: not beside other workers")


@pytest.fixture
def record_property(record_property):
    """As pytest's, with Python's own numbers: xdist can send no others."""
    return lambda name, value: record_property(name, json.loads(json.dumps(value, default=float)))


@pytest.fixture
def keep_text(record_property):
    """keep_text(what, verdict, **more): print how a text compared, and keep it for the row."""

    def keep(what, verdict, **more):
        print(f"{what}: {verdict}" + "".join(f"; {name} {value:.2f}" for name, value in more.items()))
        record_property(TEXT, {**asdict(verdict), "share_excused": verdict.share_excused, **more})

    return keep


@pytest.fixture
def keep_figures(record_property):
    """keep_figures(**figures): what a test measured, for the row."""
    return lambda **figures: record_property(FIGURES, figures)
