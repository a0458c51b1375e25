"""Damaged headers of GGUFs, and a process that loads them: what test_damaged_header.py runs.

    python tests/model/damaged_header.py FIRST LAST TARGET DENSE DRAFTER FOLDER

Case n is the same for all runs. Lines of JSON for each: {"case": n} before it, then {"case": n, "said": ...}.
Must not know: what may be said.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_NAN, _INF = float("nan"), float("inf")
_NUMBERS = [0, 1, 2, 3, 5, 7, 8, 16, 63, 64, 255, 256, 512, 513, 1024, 4096, 65535, 1 << 20, 1 << 31, -1, -2]
_REALS = [0.0, -0.0, 1.0, -1.0, 0.5, -1e-6, 1e-45, 1e30, -1e38, _NAN, _INF, -_INF]


@dataclass(frozen=True, slots=True)
class Value:
    """One value in a header: a scalar, a text, or an element of an array."""

    at: int
    kind: int
    size: int = 0
    """Of a text, in bytes."""


@dataclass(slots=True)
class Header:
    """Where things are in a GGUF's header."""

    keys: list[Value]
    types: list[int]
    values: list[list[Value]]
    names: list[Value]
    shapes: list[Value]
    tensor_types: list[int]
    offsets: list[Value]
    end: int


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24

    def number(self, kind: int) -> int:
        (value,) = struct.unpack_from("<" + _FORMATS[kind], self.data, self.at)
        self.at += struct.calcsize(_FORMATS[kind])
        return int(value)

    def value(self, kind: int) -> Value:
        if kind == _TEXT:
            size = self.number(10)
            found = Value(self.at, kind, size)
            self.at += size
            return found
        found = Value(self.at, kind)
        self.at += struct.calcsize(_FORMATS[kind])
        return found


def header_of(data: bytes) -> Header:
    """Find the parts of a GGUF's header."""
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    reader, found = _Reader(data), Header([], [], [], [], [], [], [], 0)
    for _ in range(n_keys):
        found.keys.append(reader.value(_TEXT))
        found.types.append(reader.at)
        kind = reader.number(4)
        if kind == _ARRAY:
            kind, size = reader.number(4), reader.number(10)
            found.values.append([reader.value(kind) for _ in range(size)])
        else:
            found.values.append([reader.value(kind)])
    for _ in range(n_tensors):
        found.names.append(reader.value(_TEXT))
        found.shapes += [reader.value(10) for _ in range(reader.number(4))]
        found.tensor_types.append(reader.at)
        reader.number(4)
        found.offsets.append(reader.value(10))
    found.end = reader.at
    return found


def _put(data: bytearray, value: Value, chance: random.Random) -> None:
    if value.kind == _TEXT:
        for _ in range(chance.choice([1, 1, 2]) if value.size else 0):
            data[value.at + chance.randrange(value.size)] = chance.choice([0, 0x20, 0x41, 0x80, 0xFF])
        return
    form = "<" + _FORMATS[value.kind]
    if value.kind in (6, 12):
        new: Any = chance.choice(_REALS)
    elif value.kind == 7:
        new = chance.random() < 0.5
    else:
        (old,) = struct.unpack_from(form, data, value.at)
        bits = 8 * struct.calcsize(form)
        number = chance.choice([*_NUMBERS, old + 1, old - 1, old * 2, old // 2, 1 << (bits - 1)]) % (
            1 << bits
        )
        new = number if form[1].isupper() else number - (number >> (bits - 1) << bits)
    struct.pack_into(form, data, value.at, new)


def write_value(data: bytearray, value: Value, new: Any) -> None:
    """Write a number in a value's place."""
    struct.pack_into("<" + _FORMATS[value.kind], data, value.at, new)


def damage(data: bytearray, header: Header, chance: random.Random) -> None:
    """Change one to three things in the header."""
    i = chance.randrange(len(header.keys))
    changes: list[tuple[int, Callable[[], None]]] = [
        (20, lambda: _put(data, chance.choice(header.values[i] or header.keys), chance)),
        (1, lambda: _put(data, header.keys[i], chance)),
        (1, lambda: struct.pack_into("<I", data, header.types[i], chance.choice([0, 4, 5, 6, 7, 8, 9, 13]))),
        (1, lambda: _put(data, chance.choice(header.names), chance)),
        (2, lambda: _put(data, chance.choice(header.shapes), chance)),
        (2, lambda: struct.pack_into("<I", data, chance.choice(header.tensor_types), chance.randrange(43))),
        (1, lambda: _put(data, chance.choice(header.offsets), chance)),
        (2, lambda: data.__setitem__(chance.randrange(4, header.end), chance.randrange(256))),
    ]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        i = chance.randrange(len(header.keys))
        chance.choices([change for _, change in changes], [weight for weight, _ in changes])[0]()


def _load(n: int, path: Path, target: str) -> None:
    from draftwood import Llama

    settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "draft_tokens": 3, "verbose": False}
    drafter = n % 3 == 2
    for speculation in ("dflash",) if drafter else ("mtp", "off"):
        model, given = (target, str(path)) if drafter else (str(path), None)
        llm = Llama(model, drafter=given, speculation=speculation, **settings)
        try:
            llm.create_completion("one two three", max_tokens=4, temperature=0.0)
            llm.create_chat_completion([{"role": "user", "content": "x"}], max_tokens=1)
        finally:
            llm.close()


def _said(call: Callable[..., None], *args: Any) -> str:
    from draftwood import DraftwoodError

    try:
        call(*args)
    except DraftwoodError as error:
        return f"{'draftwood' if error.hint else 'without a hint'}: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    """Try the cases from FIRST up to LAST, the latter not included."""
    first, last = map(int, sys.argv[1:3])
    files, folder = sys.argv[3:6], Path(sys.argv[6])
    wholes = [Path(file).read_bytes() for file in files]
    headers = [header_of(whole) for whole in wholes]
    path = folder / f"damaged-{first}.gguf"
    for n in range(first, last):
        data = bytearray(wholes[n % 3])
        damage(data, headers[n % 3], random.Random(f"damaged header {n}"))
        path.write_bytes(data)
        print(json.dumps({"case": n}), flush=True)
        said = _said(_load, n, path, files[0])
        print(json.dumps({"case": n, "said": said}), flush=True)


if __name__ == "__main__":
    main()
