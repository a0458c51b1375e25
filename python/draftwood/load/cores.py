"""How many CPU cores this process may use: fewer than the machine has under taskset or in a container.

ggml's threads spin while they wait. If there are more of them than cores they take turns, and every op takes
as long as a turn of the scheduler. Test: tests/unit/test_cores.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from draftwood.load import cgroups

_ROOT = cgroups.ROOT


def usable_cores() -> int:
    """Return the cores of this process's affinity, or its container's limit if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _limits())]))


def fit_threads(kwargs: dict[str, Any]) -> None:
    """Fill in default thread counts where upstream would count cores that this process cannot use.

    Half of the usable ones for a single token, all for prompts and verifies: as upstream does with all cores.
    """
    cores = usable_cores()
    if cores < (os.cpu_count() or 1):
        for name, default in (("n_threads", max(cores // 2, 1)), ("n_threads_batch", cores)):
            kwargs[name] = kwargs.get(name) or default


def _limits() -> Iterator[float]:
    """Yield the limits in cores of this process's cgroup and of those around it."""
    for folder in cgroups.folders("cpu", _ROOT):
        quota, _, period = cgroups.read(folder / "cpu.max").partition(" ")
        quota = quota or cgroups.read(folder / "cpu.cfs_quota_us")
        period = period or cgroups.read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
