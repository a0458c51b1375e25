"""Any sequences of a context verify their drafts in one decode, wherever their numbers and their states lie.

Contract: dw_verify_all in src/include/draftwood.h, src/llama/recurrent_cells.h.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaSampler
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree
from draftwood.errors import DecodeError

from bench.testing_api import verify_all
from tests.model.engine.calls import MTP, NONE
from tests.model.engine.story import grow, true_length
from tests.model.engine.test_sequences import Text, close, take
from tests.model.engine.test_tree_aborts import aborting
from tests.model.rig import Rig, Run

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

N = 8
IN_ORDER = range(N)
LONGEST = 64  # tokens of a text; then it begins anew
SUBSETS = [[seq for seq in range(N) if pattern >> seq & 1] for pattern in range(1, 1 << N)]


@dataclass
class Drawn(Text):
    """A text that a sampler of its own draws; `sampler.sampler` is its handle."""

    sampler: Any = None


def seeded(seq: int, n_vocab: int) -> LlamaSampler:
    """Return a sampler that draws another text if a token is drawn or accepted twice, or never."""
    chain = LlamaSampler()
    chain.add_penalties(n_vocab, 32, 1.1, 0.2, 0.1)
    chain.add_temp(0.8)
    chain.add_dist(100 + seq)
    return chain


def drawn_from(shared: Rig, text: Text) -> Any:
    """Return what `take` needs of a rig: its rows, and the sampler of this text."""
    if isinstance(text, Drawn):
        return SimpleNamespace(logits=shared.logits, sampler=text.sampler.sampler)
    return shared


def prompt_of(seq: int) -> tuple[int, ...]:
    return tuple((7 * seq + 3 * i + 1) % 200 + 1 for i in range(5 + 2 * seq))


def start(shared: Rig, text: Text) -> None:
    sampler = drawn_from(shared, text).sampler
    native.llama_sampler_reset(sampler)
    text.engine.reset()
    text.engine.eval(text.run.prompt, 0)
    assert text.engine.next(sampler) == text.run.tokens[0]
    text.done = 1


def drawn_run(alone: Rig, seq: int) -> Run:
    """Return the text of plain steps that this sequence's sampler draws."""
    greedy, chain = alone.sampler, seeded(seq, alone.n_vocab)
    try:
        alone.sampler = chain.sampler
        return alone.reference(LONGEST + 8, prompt_of(seq))
    finally:
        alone.sampler = greedy


def eight(shared: Rig, alone: Rig, order: Any = IN_ORDER, **settings: Any) -> list[Text]:
    """Attach an engine to each of the sequences, by number; they start in this order."""
    runs = {seq: alone.reference(LONGEST + 8, prompt_of(seq)) for seq in range(N)}
    made = {}
    for seq in order:
        engine = Engine(shared.ctx, shared.params, **{**shared.settings, **settings}, seq_id=seq)
        made[seq] = Text(engine, runs[seq])
        start(shared, made[seq])
    return [made[seq] for seq in range(N)]


def eight_drawn(shared: Rig, alone: Rig, order: Any) -> list[Text]:
    """As `eight`; each sequence has its own seed."""
    made = {}
    for seq in order:
        engine = Engine(shared.ctx, shared.params, **shared.settings, seq_id=seq)
        made[seq] = Drawn(engine, drawn_run(alone, seq), sampler=seeded(seq, shared.n_vocab))
        start(shared, made[seq])
    return [made[seq] for seq in range(N)]


def propose(text: Text, chance: random.Random, size: int) -> int:
    """Propose a chain or a tree with up to three right tokens; return how many tokens it has."""
    accept = chance.randint(1, 3)
    if chance.random() < 0.5:
        tokens = (*text.run.tokens[text.done - 1 : text.done + accept], text.run.wrong(text.done + accept))
        tree = Tree(tokens, tuple(range(-1, accept + 1)))
    else:
        tree = grow(chance, text.run, text.done, size, accept)
    text.accept = true_length(text.run, text.done, tree)
    text.engine.propose_tree(tree)
    return len(tree.tokens) - 1


def verify(shared: Rig, texts: list[Text], chance: random.Random) -> None:
    verify_all([text.engine for text in chance.sample(texts, len(texts))])
    for text in texts:
        kept = text.accept
        take(drawn_from(shared, text), text)
        assert text.accept == kept, "the draft was dropped"
    for text in texts:
        text.engine.commit()
        if text.done >= LONGEST:
            start(shared, text)


SIZES: dict[str, Any] = {
    "draft_tokens": 6,
    "tree_budget": 6,
    "n_seq_max": N,
    "n_ctx": 128 * N,
    "engine": False,
}
STARTS = {"in order": IN_ORDER, "backwards": IN_ORDER[::-1], "anyhow": (3, 6, 0, 7, 2, 5, 1, 4)}


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("order", STARTS)
def test_every_pattern_of_eight(rig, kv_unified, order, flash):
    """All 255 of them: equal texts, and every draft verified."""
    shared = rig(**SIZES, kv_unified=kv_unified, flash=flash, drafter=NONE)
    made = eight(shared, rig(flash=flash), STARTS[order])
    verify_every_pattern(shared, made)
    close(made)


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("order", STARTS)
def test_every_pattern_of_eight_that_samplers_draw(rig, order, kv_unified, flash):
    shared = rig(**SIZES, kv_unified=kv_unified, flash=flash, drafter=NONE)
    alone = rig(flash=flash)
    made = eight_drawn(shared, alone, STARTS[order])
    greedy = [alone.reference(LONGEST + 8, prompt_of(seq)).tokens for seq in range(N)]
    assert all(text.run.tokens != best for text, best in zip(made, greedy, strict=True))
    verify_every_pattern(shared, made)
    close(made)


def verify_every_pattern(shared: Rig, made: list[Text]) -> None:
    chance = random.Random(3)
    proposed = dict.fromkeys(range(N), 0)
    for subset in chance.sample(SUBSETS, len(SUBSETS)):
        for seq in subset:
            proposed[seq] += propose(made[seq], chance, 5)
        verify(shared, [made[seq] for seq in subset], chance)
    for seq, text in enumerate(made):
        stats = text.engine.stats()
        assert stats.drafted == proposed[seq]
        assert stats.accepted > 128
        assert stats.rounds == 128


def test_graphs_of_a_pattern(rig):
    """One graph in a unified cache, else one for each run of sequences, as batches on exact kernels show."""
    for kv_unified in (False, True):
        shared = rig(**SIZES, kv_unified=kv_unified)
        made = eight(shared, rig())
        chance = random.Random(1)
        for subset, runs in (([0, 2], 2), ([0, 1, 2], 1), ([1, 3, 4, 7], 3), ([0, 2, 4, 6], 4), ([7], 1)):
            for seq in subset:
                tokens = made[seq].run.tokens[made[seq].done - 1 : made[seq].done + 3]
                made[seq].engine.propose_given(tokens[0], tokens[1:])
                made[seq].accept = 3
            before = made[0].engine.stats().exact_batches
            verify(shared, [made[seq] for seq in subset], chance)
            assert made[0].engine.stats().exact_batches - before == (1 if kv_unified else runs)
        close(made)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
def test_those_who_take_plain_steps_beside(rig, kv_unified):
    """Engines that cannot verify trees have their own graph, which may move the states of others."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = eight(shared, rig(), STARTS["anyhow"])
    chance = random.Random(5)
    plain = {1, 3, 6}  # no draft was ever proposed to these
    for subset in chance.sample(SUBSETS, 60):
        for seq in subset:
            if seq in plain:
                made[seq].engine.propose_given(made[seq].run.tokens[made[seq].done - 1], [])
                made[seq].accept = 0
            else:
                propose(made[seq], chance, 5)
        verify(shared, [made[seq] for seq in subset], chance)
    assert all((made[seq].engine.stats().accepted == 0) == (seq in plain) for seq in range(N))
    close(made)


@pytest.mark.parametrize("n_ubatch", [20, 24])
def test_more_rows_than_an_ubatch(rig, n_ubatch):
    """They take several graphs of one decode."""
    shared = rig(**SIZES, kv_unified=True, n_ubatch=n_ubatch, n_batch=64)
    made = eight(shared, rig())
    chance = random.Random(2)
    for _ in range(12):
        for text in made:
            propose(text, chance, 5)
        verify(shared, made, chance)
    assert all(text.engine.stats().accepted > 12 for text in made)
    close(made)


def test_a_batch_with_no_room_for_all_rows_shortens_drafts(rig):
    shared = rig(**SIZES, kv_unified=True, n_ubatch=20, n_batch=22)
    made = eight(shared, rig())
    for text in made:
        tokens = text.run.tokens[text.done - 1 : text.done + 5]
        text.engine.propose_given(tokens[0], tokens[1:])
    verify_all([text.engine for text in made])  # two rows each
    for text in made:
        text.accept = 1
        take(shared, text)
        text.engine.commit()
    close(made)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
def test_sequences_that_come_and_go(rig, kv_unified):
    """Cells of states that are free lie between those of a verify, and others take them."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = eight(shared, rig(), STARTS["anyhow"])
    chance = random.Random(9)
    for _ in range(40):
        gone = chance.sample(range(N), 3)
        for seq in gone:
            made[seq].engine.reset()
        here = [made[seq] for seq in range(N) if seq not in gone]
        for text in here:
            propose(text, chance, 5)
        verify(shared, here, chance)
        for seq in chance.sample(gone, len(gone)):
            start(shared, made[seq])
    close(made)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("part", [0.1, 0.4, 0.6, 0.95])
def test_an_aborted_verify_of_a_pattern_leaves_all_as_they_were(rig, kv_unified, part):
    """In any of its graphs: each sequence goes on from where it was."""
    shared = rig(**SIZES, kv_unified=kv_unified, drafter=MTP)
    made = eight(shared, rig(), STARTS["anyhow"])
    chance = random.Random(4)
    chosen = [made[seq] for seq in (1, 2, 5, 7)]
    for text in chosen:
        propose(text, chance, 5)
    with aborting(shared, 1 << 30) as nodes:
        verify_all([text.engine for text in chosen])
    after = int(part * len(nodes))
    for text in chosen:
        take(shared, text)
        text.engine.commit()
    held = [text.engine.n_past for text in made]
    for _ in range(3):
        for text in chosen:
            propose(text, chance, 5)
        with aborting(shared, after), pytest.raises(DecodeError, match="llama_decode returned 2"):
            verify_all([text.engine for text in chosen])
        assert [text.engine.n_past for text in made] == held
        ends = [native.llama_memory_seq_pos_max(shared.memory, seq) + 1 for seq in range(N)]
        assert ends == held
    for _ in range(4):
        for text in made:
            propose(text, chance, 5)
        verify(shared, made, chance)
    close(made)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
def test_a_state_that_two_sequences_share(rig, kv_unified):
    """After a copy one takes a plain step, which parts them; the others verify their drafts."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = eight(shared, rig())
    made[5].engine.reset()
    native.llama_memory_seq_cp(shared.memory, 2, 5, -1, -1)
    chance = random.Random(6)
    others = [made[seq] for seq in (1, 3, 4, 7)]
    for text in others:
        propose(text, chance, 5)
    text = made[2]
    text.engine.propose_given(text.run.tokens[0], text.run.tokens[1:3])
    text.accept = 0
    verify(shared, [*others, text], chance)
    assert text.engine.stats().drafted == 0
    for each in (*others, text):
        propose(each, chance, 5)
    verify(shared, [*others, text], chance)
    assert text.engine.stats().drafted > 0
    close(made)
