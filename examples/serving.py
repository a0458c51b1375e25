"""A server for the examples of HTTP clients. No example itself: `with served(model) as url`."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """Run `draftwood serve` on a free port and yield its address, or yield the address that is given.

    Errors: SystemExit with the end of the server's log, if it ends before it answers.
    """
    if model.startswith("http"):
        yield model
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "draftwood", "serve", model, "--port", str(port), "-c", "4096"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(log.read()[-2000:])
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def _answers(address: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        return urllib.request.urlopen(address, timeout=5).status == 200
    return False
