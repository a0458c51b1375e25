"""load/cores.py: what taskset and containers leave of the machine's cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from draftwood.load import cores
from draftwood.load.cores import fit_threads, usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cores, own, {file: text}) sets up what the process may use and its cgroups."""

    def make(n: int, own: str = "", files: dict[str, str] | None = None) -> None:
        for name, text in (files or {}).items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
        monkeypatch.setattr(cores, "_ROOT", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n)), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 64)

    return make


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("", {}, 16, id="no cgroups"),
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="a container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 16, id="no limit"),
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 2, id="one core and a half"),
        pytest.param("0::/\n", {"cpu.max": "10000 100000\n"}, 1, id="a tenth of a core"),
        pytest.param(
            "0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4, id="an outer limit"
        ),
        pytest.param("0::/a\n", {"a/cpu.max": "9000000 100000"}, 16, id="more than the affinity"),
        pytest.param(
            "5:cpuset:/x\n4:cpu,cpuacct:/docker/f00\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
            id="version 1",
        ),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            16,
            id="version 1, no limit",
        ),
        pytest.param("0::/../..\n", {"cpu.max": "200000 100000"}, 2, id="a path that leads out"),
        pytest.param("0::/\n", {"cpu.max": "nonsense"}, 16, id="nonsense"),
    ],
)
def test_the_least_limit_counts(machine, own, files, expected):
    machine(16, own, files)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"n_threads": 3, "n_threads_batch": 6}),
        ({"n_threads": None, "n_threads_batch": 0}, {"n_threads": 3, "n_threads_batch": 6}),
        ({"n_threads": 5}, {"n_threads": 5, "n_threads_batch": 6}),
        ({"n_threads": 64, "n_threads_batch": 64}, {"n_threads": 64, "n_threads_batch": 64}),
    ],
)
def test_what_is_asked_for_stays(machine, given, expected):
    machine(6)
    fit_threads(given)
    assert given == expected


def test_the_whole_machine_is_upstreams_to_count(machine):
    machine(64)
    given: dict = {}
    fit_threads(given)
    assert given == {}


@pytest.mark.skipif(usable_cores() < 2, reason="one core is all there is")
def test_taskset():
    code = "from draftwood.load.cores import usable_cores; print(usable_cores())"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{code}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1\n"
