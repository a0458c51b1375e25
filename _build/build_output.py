"""Say how far ninja is, while a build step runs in this process or in its children.

ninja prints `[n/m]` before each file. Those lines become one line of progress (`progress.Status`). What a
compiler says is passed on if it fails or speaks of our own sources. Its warnings about llama.cpp would fill
40,000 lines. Must not know what is built. Entry point: `watched`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from progress import Status, times

_COUNT = re.compile(rb"\[(\d+)/(\d+)\] ")


@contextmanager
def watched(what: str, own: Path) -> Iterator[None]:
    """Take ninja's lines out of standard output during the block, and show them as `what: n of m files`.

    own: the folder whose warnings are passed on.

    Works on the file descriptor, since ninja is another process. Test: tests/unit/test_build_output.py.
    """
    old_status = os.environ.get("NINJA_STATUS")
    os.environ["NINJA_STATUS"] = "[%f/%t] "
    sys.stdout.flush()
    out = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(target=_pass_on, args=(os.fdopen(read, "rb"), out, what, bytes(own)))
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)  # closes the pipe's last end: the reader stops
        reader.join()
        os.close(out)
        if old_status is None:
            del os.environ["NINJA_STATUS"]
        else:
            os.environ["NINJA_STATUS"] = old_status


def _pass_on(lines: BinaryIO, out: int, what: str, own: bytes) -> None:
    began = time.monotonic()
    said: list[bytes] | None = None  # after a file's line; None: no file is being compiled
    with lines, Status() as status:
        for line in lines:
            count = _COUNT.match(line)
            if count is None:
                if said is None:
                    os.write(out, line)
                else:
                    said.append(line)
                continue
            _write_if_of_use(out, said or [], own)
            done, total = int(count[1]), int(count[2])
            said = [] if done < total else None
            status.line(f"{what}: {done} of {total} files, {times(time.monotonic() - began, done / total)}")
        _write_if_of_use(out, said or [], own)


def _write_if_of_use(out: int, said: list[bytes], own: bytes) -> None:
    text = b"".join(said)
    if own in text or b"FAILED: " in text or b"ninja: " in text:
        os.write(out, text)
