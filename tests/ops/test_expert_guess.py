"""dw_expert_guess on the CPU against its model in Python: tables, counters, bytes in the slots."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.expert_model import Model
from tests.ops.expert_slots import Layer, check
from tests.ops.test_expert_slots import CASES, STEPS, draw  # noqa: F401 (a fixture)

MORE = {**CASES, "more than are fetched": {"n_experts": 256, "k": 10, "n_slots": 200, "sizes": [32]}}


@pytest.mark.parametrize("policy", ["frequency", "lru"])
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_the_op_is_its_model(draw, case, policy):  # noqa: F811
    check("CPU", draw, **case, policy=policy, steps=[8, *STEPS], guess=True)


def test_a_right_guess_is_a_hit_and_a_wrong_one_goes_first():
    """6 and 7 are guessed and take the places of 2 and 3. 6 is chosen; then 7 has to go for 5."""
    parts = [np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)]
    hidden = np.ones((1, 64), np.float32)
    router = np.zeros((8, 64), np.float32)
    router[6:] = 1
    with Layer("CPU", 4, parts) as layer:
        layer.run(np.array([[0, 1], [2, 3]], np.int32))
        layer.guess(hidden, np.ones(64, np.float32), router, 2)
        table = layer.table()
        assert int(table["n_guesses"]) == 2
        assert [int(slot) >= 0 for slot in table["entries"]["slot"][:8]].count(True) == 4
        layer.run(np.array([[6, 0]], np.int32))
        steps, hits, misses, in_place, guessed, right, _ = layer.table()["counted"].tolist()
        assert (steps, hits, misses, in_place) == (2, 6, 0, 0)
        assert (guessed, right) == (2, 1)
        layer.run(np.array([[5, 6]], np.int32))
        assert int(layer.table()["entries"]["slot"][7]) == -1


def test_experts_that_are_guessed_and_there_stay():
    """Both slots have what is guessed: nothing is fetched, nothing goes."""
    model = Model(8, 2, "frequency")
    hidden, router = np.ones((1, 64), np.float32), np.zeros((8, 64), np.float32)
    router[:2] = 1
    with Layer("CPU", 2, [np.zeros((8, 32), np.uint8)]) as layer:
        layer.guess(hidden, np.ones(64, np.float32), router, 2)
        assert np.array_equal(layer.table()["entries"][:8], model.table["entries"][:8])
