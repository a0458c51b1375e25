"""What is said when memory runs out in mid-run."""

from __future__ import annotations

import warnings
from dataclasses import replace

from draftwood.engine import _capi
from draftwood.engine.shortage import Shortage
from draftwood.stats import SpeculationStats


def test_each_kind_is_said_once():
    fine = SpeculationStats.from_native(_capi.Stats())
    shared = replace(fine, shared_rounds=3)
    cut = replace(shared, row_limit=8)
    shortage = Shortage()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for stats in (fine, shared, replace(shared, shared_rounds=4), cut, replace(cut, row_limit=4)):
            shortage.tell(stats)
    found = [str(each.message).splitlines()[0] for each in said]
    assert found == [
        "memory ran out: graphs of all sizes share one place from now on, and are built each time",
        "memory ran out: verifies have at most 8 rows from now on",
    ]
    assert {each.filename for each in said} == {__file__}
    assert all("\nhint: " in str(each.message) for each in said)
