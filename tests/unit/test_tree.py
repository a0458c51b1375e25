"""src/tree/* through bench/testing_api.py: which nodes a tree keeps, held against all that it could keep.

Log-probabilities are multiples of 1/64, so that sums of them are exact in f32, and ties happen.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator

import pytest
from draftwood.engine import _capi
from draftwood.engine.tree import Tree, native_tree
from draftwood.errors import OptionError
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.testing_api import bucket, from_positions, merge, select

lib = _capi.lib
STEP = 1 / 64
ROOT = 7
BUCKETS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]

Path = tuple[int, ...]  # tokens after the root


def paths_of(tree: Tree) -> dict[Path, float]:
    """Return the log-probability of each path; no two nodes may have one path."""
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    assert len(set(paths)) == len(tree)
    return dict(zip(paths, tree.log_probs, strict=True))


def closed_sets(paths: dict[Path, float], size: int) -> Iterator[frozenset[Path]]:
    """Yield all sets of `size` paths that hold the root and each path's beginnings."""
    sets = {frozenset([()])}
    for _ in range(size - 1):
        sets = {one | {path} for one in sets for path in paths if path not in one and path[:-1] in one}
    yield from sets


def likelihood(paths: dict[Path, float]) -> float:
    """Return the tokens that a walk is expected to take: the sum of all paths' probabilities."""
    return math.fsum(math.exp(each) for each in paths.values())


def best_path(tree: Tree) -> list[int]:
    """Return the nodes of the path of all best children, root included; of equal children the first."""
    nodes = [0]
    while children := tree.children(nodes[-1]):
        nodes.append(max(children, key=lambda i: (tree.log_probs[i], -i)))
    return nodes


def check_order(tree: Tree) -> None:
    """Check that nodes come by depth, those of one depth by their parents, siblings best first."""
    assert tree.tokens[0] == ROOT
    assert tree.parents[0] == -1
    assert list(tree.depths) == sorted(tree.depths)
    assert list(tree.parents) == sorted(tree.parents)
    for node in range(len(tree)):
        chances = [tree.log_probs[i] for i in tree.children(node)]
        assert chances == sorted(chances, reverse=True)


@st.composite
def trees(draw: st.DrawFn, most: int, tokens: int = 3) -> Tree:
    """A tree of up to `most` nodes: siblings have different tokens, children are no likelier than parents."""
    nodes = [(-1, ROOT, 0.0)]  # parent, token, log-probability
    step = st.tuples(st.integers(0, most), st.integers(0, tokens - 1), st.integers(0, 40))
    size = draw(st.integers(0, most - 1))
    for up, token, cost in draw(st.lists(step, min_size=size, max_size=size)):
        parent = up % len(nodes)
        if all(node[:2] != (parent, token) for node in nodes):
            nodes.append((parent, token, nodes[parent][2] - STEP * cost))
    parents, found, log_probs = zip(*nodes, strict=True)
    return Tree(found, parents, log_probs)


@st.composite
def candidates(draw: st.DrawFn, depths: int, each: int) -> list[list[tuple[int, float]]]:
    """Candidates by position, best first, of one number in all positions."""
    n_each = draw(st.integers(0, each))
    positions = []
    for _ in range(draw(st.integers(0, depths))):
        tokens = draw(st.permutations(range(each)))[:n_each]
        steps = sorted(draw(st.lists(st.integers(0, 200), min_size=n_each, max_size=n_each)))
        positions.append([(token, -STEP * step) for token, step in zip(tokens, steps, strict=True)])
    return positions


def all_paths(positions: list[list[tuple[int, float]]], beside: float) -> dict[Path, float]:
    """Return every path through the candidates; `beside` is added to steps from one beside the best."""
    paths: dict[Path, float] = {(): 0.0}
    best: Path = ()
    level = [best]
    for position in positions:
        level = [(*path, token) for path in level for token, _ in position]
        for path in level:
            step = dict(position)[path[-1]]
            paths[path] = paths[path[:-1]] + step + (0.0 if path[:-1] == best else beside)
        if position:
            best = (*best, position[0][0])
    return paths


def test_merge_keeps_all_nodes_and_folds_what_both_have():
    one = Tree((ROOT, 1, 2), (-1, 0, 1), (0.0, -0.5, -1.0))
    other = Tree((ROOT, 3, 1, 2, 4), (-1, 0, 0, 2, 3), (0.0, -0.25, -0.125, -2.0, -3.0))
    merged = merge(one, other)
    assert merged.tokens == (ROOT, 1, 2, 3, 4)
    assert merged.parents == (-1, 0, 1, 0, 2)
    assert merged.log_probs == (0.0, -0.125, -1.0, -0.25, -3.0), "of one node the larger counts"


@settings(deadline=None)
@given(trees(12), trees(12))
def test_merge(one, other):
    merged = merge(one, other)
    wanted = {
        path: max(paths.get(path, -math.inf) for paths in (paths_of(one), paths_of(other)))
        for path in paths_of(one) | paths_of(other)
    }
    assert paths_of(merged) == wanted
    assert merged.tokens[: len(one)] == one.tokens
    assert merged.parents[: len(one)] == one.parents
    assert all(parent < i for i, parent in enumerate(merged.parents))
    assert merge(merged, other) == merge(merged, one) == merged


def test_merge_at_the_limit():
    """64 nodes are merged; one more is refused, and nothing is changed."""
    one = Tree((ROOT, *range(40)), (-1, *range(40)))
    other = Tree((ROOT, *range(100, 123)), (-1, *range(23)))
    merged = merge(one, other)
    assert len(merged) == 64
    raw = merged.to_native()
    more = Tree((ROOT, 99), (-1, 0)).to_native()
    assert lib.dw_tree_merge(ctypes.byref(raw), ctypes.byref(more)) == _capi.ERR_ARGUMENT
    assert lib.dw_last_error().decode() == "65 nodes in both trees; expected up to 64"
    assert Tree.from_native(raw) == merged
    assert merge(merged, other) == merged, "folded nodes do not count twice"


def test_merge_of_other_roots():
    with pytest.raises(OptionError, match="trees with the roots 7 and 8; expected one root"):
        merge(Tree((ROOT,), (-1,)), Tree((8,), (-1,)))


@settings(max_examples=60, deadline=None)
@given(trees(9), st.integers(1, 10), st.integers(0, 9))
def test_select_is_the_best_that_can_be(tree, budget, spine):
    """Of all sets closed under parents, with the spine, none has a larger sum of probabilities."""
    selected = select(tree, budget, spine=spine)
    check_order(selected)
    size = min(budget, len(tree))
    assert len(selected) == size
    paths = paths_of(tree)
    assert paths_of(selected).items() <= paths.items()
    by_node = list(paths)
    kept_spine = {by_node[i] for i in best_path(tree)[: min(spine + 1, size)]}
    assert kept_spine <= paths_of(selected).keys()
    largest = max(
        likelihood({path: paths[path] for path in each})
        for each in closed_sets(paths, size)
        if kept_spine <= each
    )
    assert likelihood(paths_of(selected)) == pytest.approx(largest, abs=1e-12)


@settings(deadline=None)
@given(trees(64, tokens=6), st.integers(1, 64), st.integers(0, 63))
def test_select_of_equals_takes_the_earlier(tree, budget, spine):
    """Where probabilities tie, nodes that come first do: one tree for one input."""
    kept = best_path(tree)[: spine + 1][:budget]
    rest = sorted(set(range(len(tree))) - set(kept), key=lambda i: (-tree.log_probs[i], i))
    wanted = {*kept, *rest[: budget - len(kept)]}
    selected = select(tree, budget, spine=spine)
    paths = list(paths_of(tree))
    assert paths_of(selected).keys() == {paths[i] for i in wanted}
    check_order(selected)
    for node in range(len(selected)):  # siblings too
        children = [paths.index(list(paths_of(selected))[i]) for i in selected.children(node)]
        assert children == sorted(children, key=lambda i: (-tree.log_probs[i], i))
    assert select(selected, 64) == selected


@settings(deadline=None)
@given(trees(20), st.integers(1, 64), st.integers(0, 5), st.randoms(use_true_random=False))
def test_select_never_takes_a_node_without_its_parent(tree, budget, spine, chance):
    """Also where a child is said to be more probable than its parent."""
    odd = Tree(tree.tokens, tree.parents, (0.0, *(chance.uniform(-9, 0) for _ in tree.tokens[1:])))
    selected = select(odd, budget, spine=spine)
    check_order(selected)
    assert len(selected) == min(budget, len(tree))
    assert paths_of(selected).keys() <= paths_of(odd).keys()


@settings(max_examples=60, deadline=None)
@given(candidates(3, 3), st.integers(1, 6), st.integers(0, 4), st.sampled_from([0.0, -0.5, -64.0]))
def test_from_positions_is_the_best_that_can_be(positions, budget, spine, beside):
    tree = from_positions(ROOT, positions, budget, spine=spine, beside=beside)
    paths = all_paths(positions, beside)
    assert paths_of(tree).items() <= paths.items()
    assert len(tree) == min(budget, len(paths))
    best = tuple(position[0][0] for position in positions if position)
    kept_spine = {best[:n] for n in range(min(spine, budget - 1, len(best)) + 1)}
    assert kept_spine <= paths_of(tree).keys()
    largest = max(
        likelihood({path: paths[path] for path in each})
        for each in closed_sets(paths, len(tree))
        if kept_spine <= each
    )
    assert likelihood(paths_of(tree)) == pytest.approx(largest, abs=1e-12)


@pytest.mark.parametrize("n_positions", [0, 1, 2, 3, 5, 15, 31, 63, 64, 70])
@pytest.mark.parametrize("n_each", [1, 2, 8])
def test_from_positions_of_every_budget(n_positions, n_each):
    """As many nodes as there are up to the budget, parents first, one tree the beginning of the next."""
    chance = random.Random(n_positions)
    positions = [
        sorted(((i, -STEP * chance.randrange(500)) for i in range(n_each)), key=lambda pair: -pair[1])
        for _ in range(n_positions)
    ]
    n_paths = min(64, sum(n_each**depth for depth in range(min(n_positions, 64) + 1)))
    before: dict[Path, float] = {}
    for budget in range(1, 65):
        tree = from_positions(ROOT, positions, budget, beside=-0.25)
        assert len(tree) == min(budget, n_paths)
        assert all(parent < i for i, parent in enumerate(tree.parents))
        assert before.items() <= paths_of(tree).items()
        before = paths_of(tree)
        spine = from_positions(ROOT, positions, budget, spine=63, beside=-0.25)
        n_spine = min(budget - 1, n_positions)
        assert spine.tokens[1 : 1 + n_spine] == tuple(each[0][0] for each in positions[:n_spine])
        assert spine.parents[1 : 1 + n_spine] == tuple(range(n_spine))


def test_from_positions_without_candidates():
    for positions in ([], [[]], [[], []]):
        assert from_positions(ROOT, positions, 5, spine=3) == Tree((ROOT,), (-1,), (0.0,))


def test_from_positions_folds_what_a_position_names_twice():
    positions = [[(1, -0.5), (1, -0.75), (2, -1.0)], [(3, -0.25), (3, -0.25), (3, -0.25)]]
    tree = from_positions(ROOT, positions, 64, spine=2, beside=-8.0)
    assert paths_of(tree) == {(): 0.0, (1,): -0.5, (1, 3): -0.75, (2,): -1.0, (2, 3): -9.25}


def test_from_positions_of_unequal_length():
    with pytest.raises(OptionError, match=r"1.*expected 2"):
        from_positions(ROOT, [[(1, -1.0), (2, -2.0)], [(3, -1.0)]], 8)


def test_bucket_is_the_smallest_size_that_holds_a_tree():
    for n in range(1, 65):
        assert bucket(n) == min(size for size in BUCKETS if size >= n)


def test_a_tree_knows_its_shape():
    tree = Tree((ROOT, 1, 2, 3, 1), (-1, 0, 0, 1, 2))
    assert len(tree) == 5
    assert tree.depths == (0, 1, 1, 2, 2)
    assert [tree.children(i) for i in range(5)] == [[1, 2], [3], [4], [], []]
    assert tree.walk([2, 1, 9]) == [0, 2, 4]
    assert tree.walk([2]) == [0, 2]
    assert tree.walk([9, 1]) == tree.walk([]) == [0]
    again = Tree.from_native(tree.to_native())
    assert again == Tree(tree.tokens, tree.parents, (0.0,) * 5)


# tokens and parents that are no tree, and what the refusal must say
NO_TREES = {
    "nothing": ((), (), "a tree of 0 nodes; expected 1 to 64"),
    "65 nodes": (tuple(range(65)), (-1, *range(64)), "a tree of 65 nodes; expected 1 to 64"),
    "no root": ((1, 2), (0, 0), "the root's parent is 0; expected -1"),
    "a root of another kind": ((1, 2), (-2, 0), "the root's parent is -2; expected -1"),
    "two roots": ((1, 2, 3), (-1, 0, -1), "the parent of node 2 is -1; expected a node before it"),
    "a node its own parent": ((1, 2), (-1, 1), "the parent of node 1 is 1; expected a node before it"),
    "a cycle": ((1, 2, 3), (-1, 2, 1), "the parent of node 1 is 2; expected a node before it"),
    "a parent that is none": ((1, 2), (-1, 9), "the parent of node 1 is 9; expected a node before it"),
    "a parent behind": ((1, 2, 3, 4), (-1, 0, 3, 0), "the parent of node 2 is 3; expected a node before it"),
    "twins": (
        (1, 2, 2),
        (-1, 0, 0),
        "the parent of node 2 is 0, which has a child with token 2 already; expected one",
    ),
}


@pytest.mark.parametrize("name", NO_TREES)
def test_what_is_no_tree_is_refused(name):
    tokens, parents, text = NO_TREES[name]
    bad, good = Tree(tokens, parents), Tree((1,), (-1,))
    for call in (lambda: select(bad, 4), lambda: merge(bad, good), lambda: merge(good, bad)):
        with pytest.raises(OptionError) as found:
            call()
        assert found.value.message == text


@pytest.mark.parametrize("budget", [-1, 0, 65, 1 << 30])
def test_a_budget_out_of_range(budget):
    for call in (
        lambda: select(Tree((ROOT,), (-1,)), budget),
        lambda: from_positions(ROOT, [[(1, -1.0)]], budget),
    ):
        with pytest.raises(OptionError) as found:
            call()
        assert found.value.message == f"a budget of {budget} nodes; expected 1 to 64"


def test_positions_less_than_none():
    tokens, log_probs, out = (ctypes.c_int32 * 4)(), (ctypes.c_float * 4)(), native_tree()
    for n_positions, n_each in ((-1, 2), (2, -1)):
        status = lib.dw_tree_from_positions(
            ROOT, tokens, log_probs, n_positions, n_each, 4, 0, 0.0, ctypes.byref(out)
        )
        assert status == _capi.ERR_ARGUMENT
        assert lib.dw_last_error().decode() == (
            f"{n_positions} positions of {n_each} candidates; expected 0 or more"
        )


def test_null_pointers_and_structs_of_another_size():
    good, out = Tree((ROOT, 1), (-1, 0)).to_native(), native_tree()
    tokens, log_probs = (ctypes.c_int32 * 2)(1, 2), (ctypes.c_float * 2)()
    calls = {
        "dw_tree_from_positions": [ROOT, tokens, log_probs, 1, 2, 4, 0, 0.0, ctypes.byref(out)],
        "dw_tree_merge": [ctypes.byref(good), ctypes.byref(good)],
        "dw_tree_select": [ctypes.byref(good), 2, 0, ctypes.byref(out)],
    }
    unset = _capi.Tree(n=1)
    for name, arguments in calls.items():
        assert getattr(lib, name)(*arguments) == _capi.OK
        for i, argument in enumerate(arguments):
            if isinstance(argument, (int, float)):
                continue
            status = getattr(lib, name)(*arguments[:i], None, *arguments[i + 1 :])
            assert status == _capi.ERR_ARGUMENT
            assert lib.dw_last_error().decode() == f"{name} was given a null pointer"
            if not isinstance(argument, ctypes.Array):
                status = getattr(lib, name)(*arguments[:i], ctypes.byref(unset), *arguments[i + 1 :])
                assert status == _capi.ERR_ARGUMENT
                assert "dw_tree has struct_size 0" in lib.dw_last_error().decode()
