"""load/memory.py: what a machine or a cgroup leaves, from made files."""

from __future__ import annotations

import pytest
from draftwood.load.memory import available, with_swap

GIB = 1 << 30
MEMINFO = f"MemTotal:  {32 * GIB // 1024} kB\nMemAvailable:   {16 * GIB // 1024} kB\n"
UNLIMITED = str((1 << 63) - 4096)


def made(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = {"proc/self/cgroup": "0::/user/mine\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/mine\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="nothing is known"),
        pytest.param({"proc/meminfo": MEMINFO}, 16 * GIB, id="the machine"),
        pytest.param({"proc/meminfo": "MemTotal: 5 kB\n"}, None, id="an old kernel"),
        pytest.param(
            {
                **V2,
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/user/mine/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/user/mine/memory.stat": f"anon {GIB}\nfile {2 * GIB}\n",
            },
            3 * GIB,
            id="a cgroup: its files could go",
        ),
        pytest.param(
            {
                **V2,
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/user/mine/memory.max": "max\n",
                "sys/fs/cgroup/user/mine/memory.stat": "anon 5\n",
                "sys/fs/cgroup/user/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/user/memory.stat": f"anon {3 * GIB}\n",
            },
            0,
            id="the one around it, which is full",
        ),
        pytest.param(
            {
                **V1,
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/mine/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/mine/memory.stat": f"cache 7\nrss 1\ntotal_rss {GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
                "sys/fs/cgroup/memory/memory.stat": "total_rss 1\n",
            },
            3 * GIB,
            id="version 1",
        ),
    ],
)
def test_what_is_left(tmp_path, files, expected):
    assert available(made(tmp_path, files)) == expected


SWAP = f"SwapTotal: {8 * GIB // 1024} kB\nSwapFree: {2 * GIB // 1024} kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="nothing is known"),
        pytest.param({"proc/meminfo": MEMINFO}, None, id="half of it is"),
        pytest.param({"proc/meminfo": MEMINFO + SWAP}, (18 * GIB, 40 * GIB), id="the machine"),
        pytest.param(
            {
                **V2,
                "proc/meminfo": MEMINFO + SWAP,
                "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\n",
            },
            (3 * GIB, 40 * GIB),
            id="a nested cgroup, less what it uses",
        ),
        pytest.param(
            {**V1, "proc/meminfo": MEMINFO + SWAP, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}"},
            (GIB, 40 * GIB),
            id="a cgroup that does not say what it uses",
        ),
    ],
)
def test_what_is_left_with_swap(tmp_path, files, expected):
    assert with_swap(made(tmp_path, files)) == expected


def test_this_machine():
    found = available()
    assert found is None or found > 0
    both = with_swap()
    assert both is None or 0 < both[0] <= both[1]
