"""A layer of experts with slots on a device, and how its ops are held against expert_model.py.

Must not know: what any test expects. Shapes: ids int32[rows, k].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from tests.ops import ggml_graph as ggml
from tests.ops.expert_model import MAX_PARTS, NO, TABLE, Model, first_table, random_ids, random_router

_OP_PARAMS, _LAYER_AT = 84, 24  # in struct ggml_tensor at the pin; dw::layer_at
_N_USED_AT = _LAYER_AT + 8 + 3  # dw::expert_slots::n_used_at
MAX_GUESS_ROWS = 8
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
        ("make_beside", ctypes.CFUNCTYPE(_p, _int)),
        ("free_beside", ctypes.CFUNCTYPE(None, _int, _p)),
    ]


def memory(backend: str) -> Any:
    """Return a backend's dw::slot_memory."""
    ggml.base.ggml_backend_free(ggml.open_backend(backend))  # the backend's module and device are there
    found = ggml.symbol(backend, "dw_slot_memory")
    assert found, f"{backend} has no slot memory"
    return _Memory.from_address(found)


class Layer:
    """Experts u8[n_experts, size] of each part on a device, `n_slots` of them in slots; a context manager."""

    def __init__(
        self,
        backend: str,
        n_slots: int,
        parts: Sequence[np.ndarray],
        *,
        policy: str = "frequency",
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
            device = -(-((first + n_slots) * stride - host + 512) // page) * page
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
        self.layer.state = self._memory.allocate(0, TABLE.itemsize)
        self.layer.copies = self._memory.make_beside(0)
        first_state = first_table(self.layer.n_experts, n_slots)
        self._copy(self.layer.state, first_state.ctypes.data, TABLE.itemsize)

    def _copy(self, to: int, source: int, n_bytes: int) -> None:
        assert self._memory.copy(0, to, source, n_bytes)

    def run(self, ids: np.ndarray) -> np.ndarray:
        """Run the op; return int32[n_planes, rows, k]. The rows of ids lie apart, as in a router's choice."""
        rows, k = ids.shape
        wide = np.full((rows, k + 5), 7, np.int32)
        wide[:, :k] = ids
        shape = (self.layer.n_planes, rows, k)

        def op(context: Any, given: Any) -> Any:
            narrow = ggml.view(context, given, (rows, k), (wide.strides[0],))
            name = "dw_expert_slots"
            userdata = ggml.symbol(self.backend, name)
            array = (_p * 1)(narrow)
            function = ggml.descriptor(name).cpu
            ne = (*reversed(shape), *[1] * (ggml.MAX_DIMS - len(shape)))
            node = ggml.base.ggml_custom_4d(
                context, ggml.TYPES["I32"], *ne, array, 1, function, ggml.ALL_THREADS, userdata
            )
            where = ctypes.c_uint64.from_address(node + _OP_PARAMS + _LAYER_AT)
            where.value = ctypes.addressof(self.layer)
            return node

        return ggml.run(op, [(wide, "I32")], shape, backend=self.backend, dtype=np.int32)

    def guess(self, hidden: np.ndarray, norm: np.ndarray, router: np.ndarray, k: int) -> None:
        """Run dw_expert_guess for this layer, from hidden f32[rows, n] as if a layer before it had them.

        On a card the queue of the copies has it: it is done when the next `run` is.
        """

        def op(context: Any, *given: Any) -> Any:
            name = "dw_expert_guess"
            userdata = ggml.symbol(self.backend, name)
            function = ggml.descriptor(name).cpu
            ne, array, n = (1,) * ggml.MAX_DIMS, (_p * len(given))(*given), len(given)
            node = ggml.base.ggml_custom_4d(
                context, ggml.TYPES["I32"], *ne, array, n, function, ggml.ALL_THREADS, userdata
            )
            ctypes.c_uint64.from_address(node + _OP_PARAMS + _LAYER_AT).value = ctypes.addressof(self.layer)
            ctypes.memmove(node + _OP_PARAMS + _N_USED_AT, ctypes.byref(ctypes.c_int32(k)), 4)
            return node

        operands = [(hidden, "F32"), (norm, "F32"), (router, "F32")]
        ggml.run(op, operands, (1, 1, 1, 1), backend=self.backend, dtype=np.int32)

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
        for at, host, device in self._ranges:
            self._memory.unmap(0, at, host)
            self._memory.unmap(0, at + host, device)
            self._memory.release(0, at, host + device)
        self._memory.free(0, self.layer.state)
        self._memory.free_beside(0, self.layer.copies)

    def __enter__(self) -> Layer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check(backend: str, draw: np.random.Generator, *, n_experts: int, k: int, n_slots: int, policy: str,
          sizes: Sequence[int], steps: Sequence[int], guess: bool = False) -> None:  # fmt: skip
    """Run steps of so many rows; hold each result, the table and all slots against the model.

    guess: experts are guessed before each step of up to 8 rows; every second one chooses what was guessed.
    """
    parts = [draw.integers(0, 256, (n_experts, size), np.uint8) for size in sizes]
    model = Model(n_experts, n_slots, policy)
    with Layer(backend, n_slots, parts, policy=policy) as layer:
        for rows in steps:
            ids = random_ids(draw, rows, k, n_experts)
            if guess and rows <= MAX_GUESS_ROWS:
                hidden, norm, router = random_router(draw, rows, n_experts)
                layer.guess(hidden, norm, router, k)
                model.guess(hidden, norm, router, k)
                if draw.integers(2):
                    ids = np.argsort(-(hidden * norm @ router.T), axis=1, kind="stable")[:, :k].astype(
                        np.int32
                    )
            found = layer.run(ids)
            model.step(ids)
            table = layer.table()
            n = int(model.table["n_fills"])
            assert np.array_equal(table["counted"], model.table["counted"])
            assert (int(table["step"]), int(table["n_fills"])) == (int(model.table["step"]), n)
            assert np.array_equal(table["fills"][:n], model.table["fills"][:n])
            n_guesses = int(model.table["n_guesses"])
            assert int(table["n_guesses"]) == n_guesses
            assert np.array_equal(table["guesses"][:n_guesses], model.table["guesses"][:n_guesses])
            assert np.array_equal(table["entries"][:n_experts], model.table["entries"][:n_experts])
            slots = model.table["entries"]["slot"][ids]
            for plane, first in enumerate(layer.first_slots):
                assert np.array_equal(found[plane], np.where(slots == NO, ids, first + slots))
            for part in range(len(parts)):
                plane = layer.layer.parts[part].plane
                for expert, index in {
                    (int(e), int(i)) for e, i in zip(ids.flat, found[plane].flat, strict=True)
                }:
                    assert np.array_equal(layer.expert(part, index), parts[part][expert])
