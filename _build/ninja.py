"""Say how far ninja is, while a build step runs in this process or in its children.

ninja prints `[n/m]` before each file. Those lines become one line of progress (`progress.Status`); everything
else, such as a compiler's error, is passed on. Must not know what is built. Entry point: `watched`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from progress import Status, times

_COUNT = re.compile(rb"\[(\d+)/(\d+)\] ")


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Take ninja's lines out of standard output during the block, and show them as `what: n of m files`.

    Works on the file descriptor, since ninja is another process. Test: tests/unit/test_ninja.py.
    """
    old_status = os.environ.get("NINJA_STATUS")
    os.environ["NINJA_STATUS"] = "[%f/%t] "
    sys.stdout.flush()
    out = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(target=_pass_on, args=(os.fdopen(read, "rb"), out, what))
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


def _pass_on(lines: BinaryIO, out: int, what: str) -> None:
    began = time.monotonic()
    with lines, Status() as status:
        for line in lines:
            count = _COUNT.match(line)
            if count is None:
                os.write(out, line)
                continue
            done, total = int(count[1]), int(count[2])
            status.line(f"{what}: {done} of {total} files, {times(time.monotonic() - began, done / total)}")
