"""A layer of experts with slots on a device, and how its ops are held against expert_model.py.

Must not know: what any test expects. Shapes: ids int32[rows, k].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from tests.ops import cuda_on_cpu
from tests.ops import ggml_graph as ggml
from tests.ops.expert_model import MAX_PARTS, NO, TABLE, Model, first_table, random_ids, random_router
from tests.ops.layer_part import Part

_OP_PARAMS, _LAYER_AT = 84, 24  # in struct ggml_tensor at the pin; dw::layer_at
_FLAGS_AT = _LAYER_AT + 8  # dw::expert_slots::flags_at
_HAS_NEXT, _NEXT_IS_JOINED, _COPIES_BESIDE, _CHOOSES, _N_FLAGS = range(5)
_NUMBER_AT = _FLAGS_AT + _N_FLAGS  # dw::expert_slots::number_at
_BLOCKS_AT = _NUMBER_AT + 4
_HIDDEN_OF_A_BLOCK = 32
_ROUTED = 4  # operands of dw_choice without a next router
MAX_GUESS_ROWS = 8
LEAST_STAGED_ROWS = 512
POLICIES = {"frequency": 0, "lru": 1}
_p, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _Part(ctypes.Structure):
    _fields_ = [("base", _p), ("stride", ctypes.c_int64), ("plane", ctypes.c_int32)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("n_experts", "n_slots", "n_parts", "n_planes", "victims")),
        ("parts", _Part * MAX_PARTS),
        ("first_slots", ctypes.c_int32 * MAX_PARTS),
        ("first_staged", ctypes.c_int32 * MAX_PARTS),
        ("state", _p),
        ("copies", _p),
        ("staged", _p),
        ("place", ctypes.c_int32),
        ("next", _p),
    ]


class _Memory(ctypes.Structure):
    """dw::slot_memory."""

    _fields_ = [
        ("refusal", ctypes.CFUNCTYPE(ctypes.c_char_p, _int)),
        ("page", ctypes.CFUNCTYPE(_size, _int)),
        ("reserve", ctypes.CFUNCTYPE(_p, _int, _size)),
        ("map_host", ctypes.CFUNCTYPE(ctypes.c_bool, _int, _p, _size)),
        ("map_device", ctypes.CFUNCTYPE(ctypes.c_bool, _int, _p, _size)),
        ("unmap", ctypes.CFUNCTYPE(None, _int, _p, _size)),
        ("release", ctypes.CFUNCTYPE(None, _int, _p, _size)),
        ("create", ctypes.CFUNCTYPE(_p, _int, _size)),
        ("map_shared", ctypes.CFUNCTYPE(ctypes.c_bool, _int, _p, _size, _p)),
        ("destroy", ctypes.CFUNCTYPE(None, _int, _p)),
        ("allocate", ctypes.CFUNCTYPE(_p, _int, _size)),
        ("free", ctypes.CFUNCTYPE(None, _int, _p)),
        ("copy", ctypes.CFUNCTYPE(ctypes.c_bool, _int, _p, _p, _size)),
        ("make_stage", ctypes.CFUNCTYPE(_p, _int)),
        ("free_stage", ctypes.CFUNCTYPE(None, _int, _p)),
        ("make_streams", ctypes.CFUNCTYPE(_p, _int)),
        ("free_streams", ctypes.CFUNCTYPE(None, _int, _p)),
    ]


def memory(backend: str) -> Any:
    """Return a backend's dw::slot_memory."""
    if backend == ggml.CUDA_ON_CPU:
        found = _Memory.from_buffer_copy(memory("CPU"))
        cuda_on_cpu.complete(ctypes.addressof(found))
        return found
    ggml.base.ggml_backend_free(ggml.open_backend(backend))  # the backend's module and device are there
    found = ggml.symbol(backend, "dw_slot_memory")
    assert found, f"{backend} has no slot memory"
    return _Memory.from_address(found)


def indices_of(found: np.ndarray) -> np.ndarray:
    """Return indices int32 without what says that an expert is on its way."""
    return np.where(found < 0, ~found, found)


class Layer:
    """Experts u8[n_experts, size] of each part on a device, `n_slots` of them in slots; a context manager.

    staged: prompts' experts are copied ahead (stage.h), into memory of the layer's own.
    """

    def __init__(
        self,
        backend: str,
        n_slots: int,
        parts: Sequence[np.ndarray],
        *,
        policy: str = "frequency",
        staged: bool = False,
    ) -> None:
        self.backend, self.parts, self.n_slots = backend, list(parts), n_slots
        self._memory = memory(backend)
        assert self._memory.refusal(0) is None
        page = self._memory.page(0)
        self._ranges: list[tuple[int, int, int]] = []
        self.layer = _Layer(n_experts=len(parts[0]), n_slots=n_slots, n_parts=len(parts))
        self.layer.victims = POLICIES[policy]
        firsts: list[int] = []
        for i, experts in enumerate(parts):
            stride = experts.shape[1]
            host = -(-experts.nbytes // page) * page
            first = -(-host // stride)
            if first not in firsts:
                firsts.append(first)
            n_indices = first + n_slots + (len(experts) if staged else 0)
            device = -(-(n_indices * stride - host + 512) // page) * page
            at = self._memory.reserve(0, host + device)
            assert at
            assert self._memory.map_host(0, at, host)
            assert self._memory.map_device(0, at + host, device)
            self._ranges.append((at, host, device))
            ctypes.memmove(at, experts.ctypes.data, experts.nbytes)  # host memory on every device
            self.layer.parts[i] = _Part(at, stride, firsts.index(first))
            for slot in range(n_slots):
                self._copy(at + (first + slot) * stride, at + slot * stride, stride)
        self.first_slots = firsts
        self.layer.n_planes = len(firsts)
        self.layer.first_slots[: len(firsts)] = firsts
        self.layer.first_staged[: len(firsts)] = [first + n_slots for first in firsts]
        self.layer.staged = self._stage = self._memory.make_stage(0) if staged else None
        self.layer.state = self._memory.allocate(0, TABLE.itemsize)
        self.layer.copies = self._memory.make_streams(0)
        first_state = first_table(self.layer.n_experts, n_slots)
        self._copy(self.layer.state, first_state.ctypes.data, TABLE.itemsize)

    def _copy(self, to: int, source: int, n_bytes: int) -> None:
        assert self._memory.copy(0, to, source, n_bytes)

    def run(
        self,
        ids: np.ndarray,
        *,
        guesses: np.ndarray | None = None,
        beside: bool = False,
        has_next: bool = False,
    ) -> np.ndarray:
        """Run the op; return int32[n_planes, rows, k]. The rows of ids lie apart, as in a router's choice.

        guesses: int32[rows, k] of layer.next. beside: on a card the copies have a queue of their own, for
        which dw_expert_ready waits. has_next: layer.next is in the same graph.
        """
        rows, k = ids.shape
        wide = np.full((rows, 2 * k + 5), 7, np.int32)
        wide[:, :k] = ids
        if guesses is not None:
            wide[:, k + 3 : 2 * k + 3] = guesses
        shape = (self.layer.n_planes, rows, k)

        def op(context: Any, given: Any) -> Any:
            narrow = ggml.view(context, given, (rows, k), (wide.strides[0],))
            sources = (narrow,) if guesses is None else (narrow, given)
            node = self._node(context, "dw_expert_slots", sources, shape)
            self._set_number(node, k + 3)
            for flag, is_so in ((_COPIES_BESIDE, beside), (_HAS_NEXT, has_next)):
                ctypes.c_uint8.from_address(node + _OP_PARAMS + _FLAGS_AT + flag).value = is_so
            return [node, self._node(context, "dw_expert_ready", (node, narrow), None)] if beside else node

        return indices_of(ggml.run(op, [(wide, "I32")], shape, backend=self.backend, dtype=np.int32))

    def choose(self, choice: Part, *, is_open: bool) -> tuple[np.ndarray, np.ndarray]:
        """Run dw_choice and the op behind it; return int32[n_planes, rows, k] and the choice int32[rows, E].

        is_open: on a card the op chooses. Guesses are made if the choice has a next router.
        """
        rows, k, n_experts = len(choice.operands[0][0]), choice.n_used, self.layer.n_experts
        shape, has_next = (self.layer.n_planes, rows, k), len(choice.operands) > _ROUTED

        def op(context: Any, *given: Any) -> Any:
            chosen = replace(choice, is_joint=is_open).op()(context, *given)  # settings::is_open is there
            wide = ggml.view(context, chosen, (rows, n_experts), (4 * n_experts,))
            narrow = ggml.view(context, chosen, (rows, k), (4 * n_experts,))
            node = self._node(context, "dw_expert_slots", (narrow, wide) if has_next else (narrow,), shape)
            self._set_number(node, 2 * k + 1)
            ctypes.c_uint8.from_address(node + _OP_PARAMS + _FLAGS_AT + _CHOOSES).value = is_open
            return [chosen, node]

        with ggml.Graph(op, choice.operands, backend=self.backend) as graph:
            graph.compute()
            whole = graph.bytes_of(graph.nodes[0]).view(np.int32)[: rows * n_experts]
            return indices_of(graph.get(shape, np.int32)), whole.reshape(rows, n_experts)

    def networks(
        self, choice: Part, networks: Part, first: int, *, look: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run an open dw_choice, the op, and dw_chosen_experts, which waits for experts.

        look: dw_chosen_experts may look into the table while the op runs, if the layer before made guesses.
        Guesses for layer.next are made. This layer's parts are operands first.. of networks, which is a
        dw_experts. Returns dw_chosen_experts' result f32[rows, width], the chosen experts int32[rows, k], and
        the op's int32[n_planes, rows, k] as dw_chosen_experts leaves it.
        """
        rows, k, n_experts = len(choice.operands[0][0]), choice.n_used, self.layer.n_experts
        x, norm = networks.operands[:2]
        kinds = [kind for _, kind in networks.operands[first : first + len(self.parts)]]
        shapes = [each.shape for each, _ in networks.operands[first : first + len(self.parts)]]
        shared = networks.operands[first + len(self.parts) + 1 :]

        def weights(context: Any, i: int) -> Any:
            n = self.first_slots[self.layer.parts[i].plane] + self.n_slots
            return ggml.at_address(context, (n, *shapes[i][1:]), kinds[i], self.layer.parts[i].base)

        def op(context: Any, *given: Any) -> Any:
            n_of_choice = len(choice.operands)
            chosen = replace(choice, is_joint=True).op()(context, *given[:n_of_choice])
            wide = ggml.view(context, chosen, (rows, n_experts), (4 * n_experts,))
            narrow = ggml.view(context, chosen, (rows, k), (4 * n_experts,))
            slots = self._node(context, "dw_expert_slots", (narrow, wide), (self.layer.n_planes, rows, k))
            self._set_number(slots, 2 * k + 1)
            ctypes.c_uint8.from_address(slots + _OP_PARAMS + _FLAGS_AT + _CHOOSES).value = 1
            n_blocks = k * shapes[0][1] // _HIDDEN_OF_A_BLOCK if look else 0
            ctypes.c_int32.from_address(slots + _OP_PARAMS + _BLOCKS_AT).value = n_blocks
            ready = self._node(context, "dw_expert_ready", (slots, narrow), None)
            planes = tuple(self.layer.parts[i].plane for i in (0, len(self.parts) - 1))
            last = replace(networks, name="dw_chosen_experts", planes=planes, size=n_experts)
            own = [weights(context, i) for i in range(len(self.parts))]
            return [chosen, slots, ready, last.op()(context, *given[n_of_choice:][:2], chosen, ready, *own,
                                                     *given[n_of_choice + 2 :])]  # fmt: skip

        operands = [*choice.operands, x, norm, *shared]
        with ggml.Graph(op, operands, backend=self.backend) as graph:
            graph.compute()
            chosen, indices = (graph.bytes_of(node).view(np.int32) for node in graph.nodes[:2])
            ids = chosen[: rows * n_experts].reshape(rows, n_experts)[:, :k]
            return graph.get(networks.shape), ids, indices.reshape(self.layer.n_planes, rows, k)

    def change(self, what: np.ndarray, at: int) -> None:
        """Write bytes to device memory."""
        data = np.ascontiguousarray(what)
        self._copy(at, data.ctypes.data, data.nbytes)

    def guess(self, hidden: np.ndarray, norm: np.ndarray, router: np.ndarray, k: int) -> None:
        """Run dw_expert_guess for this layer, from hidden f32[rows, n] as if a layer before it had them.

        On a card the queue of the copies has it: it is done when the next `run` is.
        """

        def op(context: Any, *given: Any) -> Any:
            node = self._node(context, "dw_expert_guess", given, (1, 1, 1, 1))
            self._set_number(node, k)
            return node

        operands = [(hidden, "F32"), (norm, "F32"), (router, "F32")]
        ggml.run(op, operands, (1, 1, 1, 1), backend=self.backend, dtype=np.int32)

    @staticmethod
    def _set_number(node: Any, n: int) -> None:
        ctypes.memmove(node + _OP_PARAMS + _NUMBER_AT, ctypes.byref(ctypes.c_int32(n)), 4)

    def _node(self, context: Any, name: str, sources: Sequence[Any], shape: tuple[int, ...] | None) -> Any:
        node = ggml.custom(name, shape, "I32")(context, *sources)
        where = ctypes.c_uint64.from_address(node + _OP_PARAMS + _LAYER_AT)
        where.value = ctypes.addressof(self.layer)
        return node

    def table(self) -> np.ndarray:
        """Return the table: TABLE."""
        found = np.zeros((), TABLE)
        self._copy(found.ctypes.data, self.layer.state, TABLE.itemsize)
        return found

    def expert(self, part: int, index: int) -> np.ndarray:
        """Return the bytes that a product finds at an index."""
        stride = self.parts[part].shape[1]
        found = np.zeros(stride, np.uint8)
        self._copy(found.ctypes.data, self.layer.parts[part].base + index * stride, stride)
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.free_streams(0, self.layer.copies)  # what runs beside reads all the rest
        for at, host, device in self._ranges:
            self._memory.unmap(0, at, host)
            self._memory.unmap(0, at + host, device)
            self._memory.release(0, at, host + device)
        self._memory.free(0, self.layer.state)
        self._memory.free_stage(0, self._stage)

    def __enter__(self) -> Layer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check(backend: str, draw: np.random.Generator, *, n_experts: int, k: int, n_slots: int, policy: str,
          sizes: Sequence[int], steps: Sequence[int], guess: bool = False,
          staged: bool = False) -> None:  # fmt: skip
    """Run steps of so many rows; hold each result, the table and all slots against the model.

    guess: experts are guessed before each step of up to 8 rows, some by an op of their own and some by
    another layer's dw_expert_slots; every second step chooses what was guessed, and every second one guesses
    for another layer.
    """
    parts = [draw.integers(0, 256, (n_experts, size), np.uint8) for size in sizes]
    model = Model(n_experts, n_slots, policy)
    other = draw.integers(0, 256, (k + 3, 32), np.uint8)
    models = {name: Model(len(other), n, "frequency") for name, n in (("before", 1), ("after", k + 1))}
    with (
        Layer(backend, n_slots, parts, policy=policy, staged=staged) as layer,
        Layer(backend, 1, [other]) as before,
        Layer(backend, k + 1, [other]) as after,
    ):
        before.layer.next = ctypes.addressof(layer.layer)
        layer.layer.next = ctypes.addressof(after.layer)
        for rows in steps:
            ids = random_ids(draw, rows, k, n_experts)
            if guess and rows <= MAX_GUESS_ROWS:
                hidden, norm, router = random_router(draw, rows, n_experts)
                order = np.argsort(-(hidden * norm @ router.T), axis=1, kind="stable")
                guesses = order[:, :k].astype(np.int32)
                if draw.integers(2):
                    layer.guess(hidden, norm, router, k)
                else:
                    chosen = random_ids(draw, rows, k, len(other))
                    before.run(chosen, guesses=guesses)
                    models["before"].step(chosen)
                    _check_table(before.table(), models["before"])
                model.guess(hidden, norm, router, k)
                ids = guesses if draw.integers(2) else ids
            ahead = random_ids(draw, rows, k, len(other)) if guess and rows <= MAX_GUESS_ROWS else None
            ahead = ahead if draw.integers(2) else None
            found = layer.run(ids, guesses=ahead, beside=ahead is None and bool(draw.integers(2)))
            model.step(ids)
            if ahead is not None:
                models["after"].fetch(ahead)
                after.run(ahead[:1])
                models["after"].step(ahead[:1])
                _check_table(after.table(), models["after"])
            _check_table(layer.table(), model)
            _check_indices(layer, model, ids, found)


def _check_table(table: np.ndarray, model: Model) -> None:
    n = int(model.table["n_fills"])
    assert np.array_equal(table["counted"], model.table["counted"])
    assert (int(table["step"]), int(table["n_fills"])) == (int(model.table["step"]), n)
    assert np.array_equal(table["fills"][:n], model.table["fills"][:n])
    n_guesses = int(model.table["n_guesses"])
    assert int(table["n_guesses"]) == n_guesses
    assert np.array_equal(table["guesses"][:n_guesses], model.table["guesses"][:n_guesses])
    assert np.array_equal(table["entries"][: model.n_experts], model.table["entries"][: model.n_experts])


def _check_indices(layer: Layer, model: Model, ids: np.ndarray, found: np.ndarray) -> None:
    """And what lies there."""
    slots = model.table["entries"]["slot"][ids]
    is_staged = layer.layer.staged and len(ids) >= LEAST_STAGED_ROWS
    for plane, first in enumerate(layer.first_slots):
        absent = ids + (layer.layer.first_staged[plane] if is_staged else 0)
        assert np.array_equal(found[plane], np.where(slots == NO, absent, first + slots))
    for part, experts in enumerate(layer.parts):
        plane = layer.layer.parts[part].plane
        for expert, index in {(int(e), int(i)) for e, i in zip(ids.flat, found[plane].flat, strict=True)}:
            assert np.array_equal(layer.expert(part, index), experts[expert])
