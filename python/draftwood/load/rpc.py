"""RPC servers as devices of a model: ggml's `ggml-rpc-server`, here or elsewhere, for `Llama(rpc_servers=)`.

ggml ends the process where a server cannot be reached or speaks another protocol, so each is greeted from
here first. Its devices go to the model that asked, not into ggml's registry: no other model of the process
comes to depend on that server. One that goes away while it is in use still ends the process.
Must not know: models, contexts. Test: tests/model/test_rpc.py.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import threading
from collections import Counter
from typing import Any

from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.errors import OptionError, ServerError, UnsupportedError
from draftwood.load.devices import cards, others
from draftwood.load.programs import program

PROTOCOL = (7, 0)
"""RPC_PROTO_MAJOR_VERSION and the newest RPC_PROTO_MINOR_VERSION of ggml-rpc.h at the pin."""
PATIENCE = 5.0
"""Seconds that a server may take to answer."""

_ADDRESS = re.compile(r"([\w.-]+):(\d{1,5})", re.ASCII)
_HELLO = struct.pack("<BQ24x", 14, 24)  # RPC_CMD_HELLO, size of what follows, no wish for another transport
_ANSWER = struct.Struct("<QBBB25x")  # size of what follows (28), major, minor, patch

_lib: Any = _capi.lib
_lock = threading.Lock()
_held: Counter[str] = Counter()  # connections of this process, by address


class Servers:
    """The devices of some servers, then this machine's cards, in the order in which llama.cpp takes them.

    Stays connected until `close()`: a server has one client at a time, and no other shall come in between.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.devices: list[int] = []
        self._open: list[tuple[str, ctypes.c_void_p]] = []
        try:
            for address in addresses:
                self._connect(address)
            self._check_number()
        except BaseException:
            self.close()
            raise
        everything = [*self.devices, *cards(), None]
        self._array = (ctypes.c_void_p * len(everything))(*everything)

    @property
    def as_param(self) -> int:
        """For `llama_model_params.devices`; the object must outlive the model."""
        return ctypes.addressof(self._array)

    def close(self) -> None:
        """Let go of the servers. Closing twice is allowed."""
        while self._open:
            address, backend = self._open.pop()
            with _lock:
                _lib.ggml_backend_free(backend)
                _held[address] -= 1

    def _connect(self, address: str) -> None:
        with _lock:
            if _held[address] == 0:  # else ggml takes the connection it has, and a second gets no answer
                greet(address)
            found = _devices_of(address)
            _lib.ggml_backend_dev_init.restype = ctypes.c_void_p
            backend = ctypes.c_void_p(_lib.ggml_backend_dev_init(ctypes.c_void_p(found[0]), None))
            _held[address] += 1
        self._open.append((address, backend))
        self.devices += found

    def _check_number(self) -> None:
        most = int(native.llama_max_devices()) - others()
        found = len(self.devices) + len(cards())
        if found > most:  # the scheduler's GGML_ASSERT otherwise
            raise OptionError(
                f"found {found} devices with those of rpc_servers; expected at most {most}",
                hint="name fewer servers in rpc_servers",
            )


def connect(servers: str | None, n_gpu_layers: int = -1) -> Servers | None:
    """Return the devices of "host:port,host:port", connected; None for None.

    Errors: OptionError for text that is no such list, or where no layer is to leave the CPU; ServerError for
    one that does not answer, or not as ggml's server of this version does; UnsupportedError without the
    backend.
    """
    if servers is None:
        return None
    addresses = checked_addresses("rpc_servers", servers, 'rpc_servers="127.0.0.1:50052"')
    if n_gpu_layers == 0:
        raise OptionError(
            "found rpc_servers= beside n_gpu_layers=0, which leaves every layer on this machine's CPU",
            hint="n_gpu_layers=-1 for all layers",
        )
    if not native.llama_supports_rpc():
        raise UnsupportedError(
            "found rpc_servers=; this library was built with GGML_RPC=OFF, expected one with the RPC backend",
            hint="pip install . without -DGGML_RPC=OFF in CMAKE_ARGS",
        )
    return Servers(list(dict.fromkeys(addresses)))


def checked_addresses(name: str, servers: Any, hint: str) -> list[str]:
    """Return the addresses in "host:port,host:port". Errors: OptionError for any other value."""
    addresses = [part.strip() for part in servers.split(",")] if isinstance(servers, str) else []
    if not addresses or not all(map(_is_address, addresses)):
        raise OptionError(
            f"{name} is {servers!r}; expected host:port, or several with commas between them", hint=hint
        )
    return addresses


def greet(address: str) -> None:
    """Make sure that a server of our protocol answers at host:port and is free. Errors: ServerError.

    The first connection sends nothing and waits for the server to end it, which a busy one does later: an
    answer that finds its client gone would end that server with SIGPIPE.
    """
    _exchange(address, b"")
    answer = _exchange(address, _HELLO)
    if len(answer) != _ANSWER.size or _ANSWER.unpack(answer)[0] != _ANSWER.size - 8:
        raise ServerError(
            f"what answers at {address} is no ggml RPC server of this version: {answer[:40]!r}",
            hint=f"the one that belongs to this package: {program('ggml-rpc-server')}",
        )
    _, major, minor, patch = _ANSWER.unpack(answer)
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise ServerError(
            f"the RPC server at {address} speaks protocol {major}.{minor}.{patch}; expected "
            f"{PROTOCOL[0]}.{PROTOCOL[1]} or older",
            hint="start the ggml-rpc-server of this package there (draftwood/bin)",
        )


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65535


def _exchange(address: str, message: bytes) -> bytes:
    """Send a message and no more, and return all that comes back."""
    host, _, port = address.partition(":")
    answer = b""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:  # ggml knows IPv4 only
            connection.settimeout(PATIENCE)
            connection.connect((host, int(port)))
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            while len(answer) <= _ANSWER.size and (part := connection.recv(64)):
                answer += part
    except TimeoutError:
        raise ServerError(
            f"the RPC server at {address} is silent for {PATIENCE:g} s; it serves one client at a time",
            hint="end its other client, or start a server on another port",
        ) from None
    except (OSError, UnicodeError) as error:  # the latter for names that are none
        raise ServerError(
            f"no RPC server answers at {address}: {error}",
            hint=f"{program('ggml-rpc-server')} --host HOST --port PORT",
        ) from None
    return answer


def _devices_of(address: str) -> list[int]:
    for name in ("reg_by_name", "reg_get_proc_address", "reg_dev_get"):
        getattr(_lib, f"ggml_backend_{name}").restype = ctypes.c_void_p
    _lib.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    rpc = ctypes.c_void_p(_lib.ggml_backend_reg_by_name(b"RPC"))
    function = _lib.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(function)
    server = ctypes.c_void_p(add_server(address.encode()))
    if not server:
        raise ServerError(
            f"the RPC server at {address} has no devices; expected one or more",
            hint="start ggml-rpc-server without --device, or with one that it lists",
        )
    count = _lib.ggml_backend_reg_dev_count(server)
    return [_lib.ggml_backend_reg_dev_get(server, ctypes.c_size_t(i)) for i in range(count)]
