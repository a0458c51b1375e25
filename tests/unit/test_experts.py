"""Sizes as users write them, how many experts fit, and heat files."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftwood.engine.engine import ModelInfo
from draftwood.errors import ExpertMemoryError, OptionError, UnsupportedError
from draftwood.load import experts, memory, preparation

from tests.unit.model_of_experts import DRAFTER, GIB, INFO


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (0, 0), (7, 7), ("7", 7), ("7B", 7), ("6GiB", 6 * GIB), ("6 gib", 6 * GIB), ("1.5GiB", 3 * GIB // 2),
        ("900 MB", 900_000_000), ("2KB", 2000), (" 3MiB ", 3 << 20),
    ],
)  # fmt: skip
def test_sizes(text, n_bytes):
    assert experts.to_bytes(text, "expert_vram") == n_bytes


@pytest.mark.parametrize(
    "size", [-1, True, 1.5, "9" * 400, "", "6 apples", "GiB", "-6GiB", "6GiB6", [], "1e9", "nan"]
)
def test_what_is_no_size_is_refused(size):
    with pytest.raises(OptionError, match=r"expert_vram is .*; expected a number of bytes"):
        experts.to_bytes(size, "expert_vram")


@pytest.mark.parametrize(
    ("mib", "slots"), [(0, 8), (511, 8), (576, 9), (1024, 16), (8192, 128), (16383, 255)]
)
def test_slots_are_what_fits(mib, slots):
    found = experts.share(INFO, mib << 20, {})
    assert found == experts.Share(slots, "CPU")


@pytest.mark.parametrize("gib", [16, 1000])
def test_a_card_that_holds_all_needs_no_pool(gib):
    assert experts.share(INFO, gib * GIB, {}) is None


def test_nobody_asked():
    assert experts.share(INFO, None, {}) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_experts": 0, "n_expert_layers": 0, "expert_bytes": 0}, "this model has no experts"),
        ({"n_experts": 2048}, "2048 experts; a pool holds 1024 at most"),
    ],
)
def test_models_without_a_pool_are_refused(changes, text):
    fields = {name: getattr(INFO, name) for name in INFO.__slots__} | changes
    with pytest.raises(UnsupportedError, match=text):
        experts.share(ModelInfo(**fields), 6 * GIB, {})


def test_several_cards_need_a_choice(monkeypatch):
    monkeypatch.setattr(experts, "cards", lambda: [1, 2])
    monkeypatch.setattr(experts, "describe", lambda card: {"name": f"CUDA{card - 1}"})
    with pytest.raises(UnsupportedError, match="found 2 cards; a pool of experts lies on one"):
        experts.share(INFO, 6 * GIB, {"n_gpu_layers": -1})
    one = {"n_gpu_layers": -1, "split_mode": 0, "main_gpu": 1}
    assert experts.share(INFO, GIB, one) == experts.Share(16, "CUDA1")
    # a stage of two layers, 0.8 GiB, comes first where as much is left
    assert experts.share(INFO, 8 * GIB, one) == experts.Share(115, "CUDA1", stage=True)
    with pytest.raises(OptionError, match="main_gpu is 7; expected 0 to 1"):
        experts.share(INFO, 6 * GIB, {**one, "main_gpu": 7})


def test_a_hint_of_sizes_is_nobodys_words():
    with pytest.raises(OptionError) as error:
        experts.to_bytes("6 apples", "vram")
    assert error.value.hint.startswith("6GiB, for example; ")


NOTHING = {
    "vram": None,
    "expert_vram": None,
    "n_cpu_moe": 0,
    "tensor_buft_overrides": None,
    "rpc_servers": None,
}


def given(**changes):
    return {**NOTHING, **changes}


def test_room_is_what_was_asked_for():
    assert experts.room(INFO, given(expert_vram="6GiB"), {}) == 6 * GIB
    assert experts.room(INFO, given(), {}) is None


def test_of_vram_experts_get_what_is_left():
    rest = experts.beside(INFO, {"n_ctx": 32768})
    assert rest > 5 * GIB + 2 * 11_000 * 32768 + 4 * 512 * 250_000
    assert experts.room(INFO, given(vram="12GiB"), {"n_ctx": 32768}) == 12 * GIB - rest
    assert experts.beside(INFO, {"n_ctx": 65536}) > rest
    assert experts.beside(INFO, {"n_ctx": 32768, "n_ubatch": 256}) < rest


def test_a_drafter_takes_its_part_of_vram(tmp_path):
    rest = experts.beside(INFO, {"n_ctx": 4096})
    assert experts.beside(INFO, {"n_ctx": 4096, "drafter": str(DRAFTER)}) == rest + DRAFTER.stat().st_size
    assert experts.beside(INFO, {"n_ctx": 4096, "drafter": str(tmp_path / "none")}) == rest


def test_a_projector_and_further_sequences_take_theirs(tmp_path):
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"x" * 12345)
    rest = experts.beside(INFO, {"n_ctx": 4096})
    assert experts.beside(INFO, {"n_ctx": 4096, "mmproj": str(projector)}) == rest + 12345
    assert experts.beside(INFO, {"n_ctx": 4096, "n_seq_max": 1}) == rest
    assert experts.beside(INFO, {"n_ctx": 4096, "n_seq_max": 4}) - rest > 3 * (66 + 28) * 10**6  # state, tree


def test_the_models_own_context_is_what_the_header_says():
    own = replace(INFO, n_ctx_train=32768)
    assert experts.beside(own, {"n_ctx": 0}) == experts.beside(INFO, {"n_ctx": 32768})
    assert experts.beside(INFO, {"n_ctx": 0}) == experts.beside(INFO, {"n_ctx": 4096})
    with pytest.raises(OptionError, match="with n_ctx=32768"):
        experts.room(own, given(vram="4 GB"), {"n_ctx": 0})


def test_vram_that_is_too_small_is_refused():
    rest = experts.beside(INFO, {"n_ctx": 2048})
    with pytest.raises(
        OptionError, match=rf"vram is '4 GB'; expected {rest} bytes or more: .* with n_ctx=2048"
    ) as error:
        experts.room(INFO, given(vram="4 GB"), {"n_ctx": 2048})
    typed = re.match(r'vram="(\d+MiB)"; a smaller n_ctx or n_ubatch needs less', error.value.hint)[1]
    left = experts.room(INFO, given(vram=typed), {"n_ctx": 2048})
    assert experts.fitting(INFO, left, "CPU").slots == INFO.n_experts_used
    assert left * INFO.n_experts >= INFO.n_experts_used * INFO.expert_bytes


@pytest.mark.parametrize("size", [{"vram": "12GiB"}, {"expert_vram": "6GiB"}])
def test_layers_in_host_memory_and_a_pool_are_two_ways(size):
    with pytest.raises(OptionError, match="found n_cpu_moe beside vram or expert_vram"):
        experts.room(INFO, given(n_cpu_moe=8, **size), {})


def test_a_card_keeps_room_for_prompts_and_a_cpu_does_not():
    assert experts.fitting(INFO, 8 * GIB, "card") == experts.Share(115, "card", stage=True)
    assert experts.fitting(INFO, 8 * GIB, "CPU") == experts.Share(128, "CPU")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(7, "7 bytes"), (1 << 20, "1 MiB"), (100 << 20, "100 MiB"), (3 << 29, "1.5 GiB")],
)
def test_a_size_is_shown_in_its_unit(n_bytes, text):
    assert experts.gib(n_bytes) == text


@pytest.mark.parametrize(
    ("cards", "why"),
    [([], "found no card"), ([0], "n_gpu_layers is 0; n_gpu_layers=-1 puts them on the card")],
)
def test_a_pool_in_plain_memory_warns(monkeypatch, cards, why):
    monkeypatch.setattr(experts, "cards", lambda: cards)
    with pytest.warns(UserWarning, match=f"{experts.IN_PLAIN_MEMORY}, where they save nothing: {why}"):
        experts.share(INFO, 6 * GIB, {})


def test_less_than_a_tokens_experts_warns(recwarn):
    with pytest.warns(UserWarning, match="experts get 1000 bytes and take 512 MiB: .* a token's 8 experts"):
        assert experts.share(INFO, 1000, {}).slots == 8
    experts.share(INFO, 512 << 20, {})
    assert not [each for each in recwarn if "experts get" in str(each.message)]


def test_what_a_part_of_the_experts_takes():
    """Slots, and on a card room for prompts' experts; None stands for all."""
    info, staged = INFO, 2 * INFO.expert_bytes // INFO.n_expert_layers
    part = experts.fitting(info, 8 * GIB, "CUDA0")
    assert part.stage
    assert experts.taken_by(part, info) == part.slots * info.expert_bytes // info.n_experts + staged
    assert 7 * GIB < experts.taken_by(part, info) <= 8 * GIB
    assert experts.taken_by(None, info) == info.expert_bytes


def test_one_size_is_enough():
    with pytest.raises(OptionError, match="found vram and expert_vram; expected one"):
        experts.room(INFO, given(vram="12GiB", expert_vram="6GiB"), {})


@pytest.fixture
def card(monkeypatch):
    """card(free bytes): the one that is found, on a machine that has memory."""
    monkeypatch.setattr(memory, "available", lambda: 64 * GIB)

    def make(*free, backend="CUDA"):
        monkeypatch.setattr(experts, "cards", lambda: list(range(len(free))))
        monkeypatch.setattr(
            experts,
            "describe",
            lambda i: {"name": f"CUDA{i}", "backend": backend, "memory_free": free[i]},
        )

    return make


ALL = {"n_gpu_layers": -1, "n_ctx": 4096}


@pytest.mark.parametrize("layers", [-1, 99, 42])  # 40, an MTP block, and the output
def test_a_model_larger_than_its_card_gets_what_is_free(card, layers):
    card(16 * GIB)
    wanted = {**ALL, "n_gpu_layers": layers}
    assert experts.room(INFO, given(), wanted) == 16 * GIB - experts.beside(INFO, ALL)


@pytest.mark.parametrize(
    ("free", "kwargs", "placement"),
    [
        ([80 * GIB], ALL, {}),  # all of it fits
        ([16 * GIB], {**ALL, "n_gpu_layers": 20}, {}),  # the caller has placed layers
        ([16 * GIB], {**ALL, "n_gpu_layers": 41}, {}),  # all of them, and the output is left out
        ([16 * GIB], ALL, {"n_cpu_moe": 8}),
        ([16 * GIB], ALL, {"rpc_servers": "host:1"}),
        ([16 * GIB, 16 * GIB], ALL, {}),
        ([3 * GIB], ALL, {}),  # not even the rest fits: llama.cpp says so
        ([], ALL, {}),
    ],
)
def test_else_nothing_is_placed(card, free, kwargs, placement):
    card(*free)
    assert experts.room(INFO, given(**placement), kwargs) is None


@pytest.mark.parametrize(
    ("n_bytes", "layers"), [(0, 40), (8 * GIB, 20), (15 * GIB, 3), (16 * GIB, 0), (99 * GIB, 0)]
)
def test_layers_whose_experts_do_not_fit(n_bytes, layers):
    assert experts.layers_that_do_not_fit(INFO, n_bytes) == layers


def test_a_machine_with_less_memory_than_experts(card, monkeypatch):
    """Who asked for a pool is refused before anything is loaded; else the CPU computes what does not fit."""
    card(16 * GIB)
    monkeypatch.setattr(memory, "available", lambda: 12 * GIB)
    why = r"a pool keeps all experts in host memory, 16.0 GiB, and 12.0 GiB are free"
    with pytest.raises(ExpertMemoryError, match=f"{why}; expected as much") as error:
        preparation._pool(INFO, {**given(vram="12GiB"), "expert_guess": None}, None, ALL)
    assert re.match(r"n_cpu_moe=\d+ in place of vram", error.value.hint)
    with pytest.warns(UserWarning, match=f"{why}: the CPU computes the experts of \\d+ layers") as said:
        pool, _, n_cpu_moe = preparation._pool(INFO, {**given(), "expert_guess": None}, None, ALL)
    assert len(said) == 1
    assert pool is None
    assert n_cpu_moe == experts.layers_that_do_not_fit(INFO, 16 * GIB - experts.beside(INFO, ALL))
    monkeypatch.setattr(memory, "available", lambda: None)
    assert experts.short_of_host(INFO) == ""


class _Pool:
    """One that a card has."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.heat: Any = None

    def set_heat(self, heat: Any) -> None:
        self.heat = heat


def test_a_pool_that_nobody_asked_for_is_said(card, monkeypatch):
    card(16 * GIB)
    monkeypatch.setattr(experts, "ExpertPool", _Pool)
    text = r"takes 2\d\.\d GiB and CUDA0 has 16.0 GiB free: \d\d% of its experts lie on the card"
    with pytest.warns(UserWarning, match=text) as said:
        pool, part, n_cpu_moe = preparation._pool(INFO, {**given(), "expert_guess": None}, None, ALL)
    assert len(said) == 1
    assert isinstance(pool, _Pool)
    assert part.device == "CUDA0"
    assert n_cpu_moe == 0


def test_a_card_that_cannot_have_a_pool(card, monkeypatch):
    """Who asked for one is refused; else the CPU computes what does not fit, and only that is said."""

    def refuse(*_, **__):
        raise UnsupportedError("CUDA0 cannot hold a part of the experts: no virtual memory management")

    card(16 * GIB)
    monkeypatch.setattr(experts, "ExpertPool", refuse)
    why = "CUDA0 cannot hold a part of the experts: no virtual memory management"
    with pytest.warns(UserWarning, match=f"{why}: the CPU computes the experts of \\d+ layers") as said:
        pool, part, n_cpu_moe = preparation._pool(INFO, {**given(), "expert_guess": None}, None, ALL)
    assert len(said) == 1
    assert (pool, part) == (None, None)
    assert 0 < n_cpu_moe == experts.layers_that_do_not_fit(INFO, 16 * GIB - experts.beside(INFO, ALL))
    with pytest.raises(UnsupportedError, match=why):
        preparation._pool(INFO, {**given(vram="12GiB"), "expert_guess": None}, None, ALL)


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        (None, None, False),
        (True, None, False),
        (None, "CPU", False),
        (True, "CPU", True),
        (None, "CUDA0", True),
        (True, "CUDA0", True),
        (False, "CUDA0", False),
    ],
)
def test_where_experts_are_guessed(given, device, expected):
    share = None if device is None else experts.Share(4, device)
    assert experts.guesses(given, share) is expected


@pytest.mark.parametrize("given", [2, "yes", []])
def test_a_guess_that_is_no_bool(given):
    with pytest.raises(OptionError, match="expected True, False or None"):
        experts.guesses(given, experts.Share(4, "CUDA0"))


@pytest.mark.parametrize("given", [1, np.bool_(True)], ids=repr)
def test_a_guess_of_another_type(given):
    assert experts.guesses(given, experts.Share(4, "CPU")) is True
    assert experts.guesses(type(given)(0), experts.Share(4, "CUDA0")) is False


def test_a_size_of_numpys_type():
    assert experts.to_bytes(np.int64(1 << 20), "expert_vram") == 1 << 20
