"""Eval callbacks see our nodes by name: "<op>-<layer>", or "<op>-<tensor that it works on>"."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine._capi import RESULTS_TOP
from draftwood.engine.tree import Tree

from tests.ops import ggml_graph as ggml

# contexts with snapshots of their state have no nodes of ours
pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

CALLBACK = native.ggml_backend_sched_eval_callback


class Watch:
    """An eval callback that notes names, ops and times of all nodes, and asks for no data."""

    def __init__(self):
        self.ops = {}
        self.times = Counter()
        self.callback = CALLBACK(self.see)

    def see(self, tensor, ask, _user):
        name = ggml.base.ggml_get_name(tensor).decode()
        self.times[name] += ask
        self.ops[name] = ggml.base.ggml_op_desc(tensor).decode()
        return not ask

    def layers(self, pattern):
        """Return the layers of custom nodes whose name is the pattern, a dash and a layer."""
        found = (re.fullmatch(rf"{pattern}-(\d+)", name) for name, op in self.ops.items() if op == "CUSTOM")
        return {int(match[1]) for match in found if match}


@pytest.fixture
def verified(rig):
    """What a callback saw while a tree that branches was verified."""
    watch = Watch()
    r = rig(tree_budget=8, results=RESULTS_TOP, cb_eval=watch.callback)
    first = r.start()
    watch.ops.clear()
    r.engine.propose_tree(Tree((first, 5, 6, 7), (-1, 0, 0, 1)))
    r.engine.verify()
    return watch


def test_every_node_of_ours_has_a_name(verified):
    ours = [name for name, op in verified.ops.items() if op == "CUSTOM"]
    assert ours
    assert all(name.startswith("dw_") for name in ours), ours


def test_names_tell_op_and_layer(verified):
    recurrent = verified.layers("dw_tree_delta_net")
    attention = verified.layers("dw_tree_scores-kq")
    assert recurrent
    assert attention
    assert not recurrent & attention
    assert verified.layers("dw_tree_conv_windows") == recurrent
    assert verified.layers("dw_tree_values-kq_soft_max") == attention
    assert verified.ops["dw_top_rows"] == "CUSTOM"
    for il in recurrent:
        assert {f"dw_tree_conv_kept-{il}", f"dw_tree_delta_out-{il}"} <= set(verified.ops)
