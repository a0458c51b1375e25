"""Layers on an RPC server: text, drafts that are really accepted, no op of ours on the wire, errors in words.

The bundled server runs on loopback and on one thread. What may end a process is done by a process of its own.
The server's CPU runs stock kernels, whose rows depend on the size of the batch, so its text need not be the
same with drafting on and off; what is compared is each token of the drafted text against a plain step behind
the same tokens.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftwood import Llama, OptionError, ServerError
from draftwood.cli.serve import program
from draftwood.engine import _capi
from draftwood.load import rpc
from draftwood.load.devices import cards

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models" / "tiny-moe"
MODEL, DRAFTER = str(MODELS / "tiny-moe-f16.gguf"), str(MODELS / "dflash-f16.gguf")

GRAPH_COMPUTE = 10  # RPC_CMD_GRAPH_COMPUTE
# struct rpc_tensor of ggml-rpc.cpp, packed
TENSOR = np.dtype(
    [("id", "<u8"), ("type", "<u4"), ("buffer", "<u8"), ("ne", "<u4", 4), ("nb", "<u4", 4), ("op", "<u4"),
     ("op_params", "<i4", 16), ("flags", "<i4"), ("src", "<u8", 10), ("view_src", "<u8"),
     ("view_offs", "<u8"), ("data", "<u8"), ("name", "S64"), ("use_count", "<i4")]
)  # fmt: skip

# texts of one process with these layers on the server: as "off", drafted, and how a plain step agrees
CLIENT = """
import json, sys
from pathlib import Path
from draftwood import Llama
model, address, wishes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
prompts = [json.loads(path.read_text().splitlines()[0])["text"][:200]
           for path in sorted((Path(model).parent / "heldout").glob("*.jsonl"))]
common = dict(rpc_servers=address, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)

def tokens(llm, n):
    return [[t for t, _ in zip(llm.generate(llm.tokenize(p.encode()), temp=0), range(n))] for p in prompts]

layers = wishes.pop("n_gpu_layers", -1)
plain = Llama(model, n_gpu_layers=layers, speculation="off", **common)
said = {"off": tokens(plain, 24)}
if wishes:
    llm = Llama(model, n_gpu_layers=layers, **wishes, **common)
    said["on"], stats = tokens(llm, 24), llm.speculation_stats
    said |= {"drafted": stats.drafted, "accepted": stats.accepted, "trees": stats.tree_rounds,
             "snapshots": llm.context_params.n_rs_seq, "refusal": llm.tree_refusal}
    llm.close()
    agreed = []
    for prompt, drafted in zip(prompts, said["on"]):
        plain.reset()
        plain.eval(plain.tokenize(prompt.encode()))
        for token in drafted:
            agreed.append(int(plain.sample(temp=0) == token))
            plain.eval([token])
    said["agreement"] = sum(agreed) / len(agreed)
print(json.dumps(said))
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server beside other programs may take long to answer."""
    monkeypatch.setattr(rpc, "PATIENCE", 60.0)


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the bundled server; yield its address and process."""
    port = free_port()
    command = [str(program("ggml-rpc-server")), "-p", str(port), "-t", "1"]
    quiet = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet
    ) as process:
        try:
            address, deadline = f"127.0.0.1:{port}", time.monotonic() + 60
            while True:
                try:
                    rpc.greet(address)
                    break
                except ServerError:
                    assert process.poll() is None, "the server ended by itself"
                    assert time.monotonic() < deadline, "the server was not ready within 60 s"
                    time.sleep(0.05)
            yield address, process
        finally:
            process.kill()


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of this test's own: address and process."""
    with serving() as it:
        yield it


class Tap:
    """Stands between clients and a server, passes everything on, and keeps the names of the ops sent."""

    def __init__(self, address: str) -> None:
        self.ops: set[str] = set()
        self.error: BaseException | None = None
        host, _, port = address.partition(":")
        self._behind = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            with client, socket.create_connection(self._behind) as server:
                for each in (client, server):  # small messages wait for the last one's receipt otherwise
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._back, args=(server, client), daemon=True)
                back.start()
                try:
                    self._forth(client.makefile("rb"), server)
                except BaseException as error:
                    self.error = error
                server.shutdown(socket.SHUT_WR)
                back.join()

    @staticmethod
    def _back(server: socket.socket, client: socket.socket) -> None:
        while part := server.recv(1 << 16):
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)

    def _forth(self, client: Any, server: socket.socket) -> None:
        while head := client.read(9):  # a byte for the command, eight for the size of what follows
            command, size = struct.unpack("<BQ", head)
            body = client.read(size)
            if command == GRAPH_COMPUTE:
                self._look_at(body)
            server.sendall(head + body)

    def _look_at(self, body: bytes) -> None:
        (n_nodes,) = struct.unpack_from("<I", body, 4)  # behind the device
        (n_tensors,) = struct.unpack_from("<I", body, 8 + 8 * n_nodes)
        start = 12 + 8 * n_nodes
        assert len(body) == start + n_tensors * TENSOR.itemsize, "another layout of rpc_tensor"
        tensors = np.frombuffer(body, TENSOR, n_tensors, start)
        name = _capi.lib.ggml_op_name
        name.restype = ctypes.c_char_p
        self.ops |= {name(int(op)).decode() for op in np.unique(tensors["op"])}


@pytest.fixture
def tapped(server: Any) -> Iterator[tuple[Tap, subprocess.Popen[bytes]]]:
    """A tap before a server of this test's own, and the server's process."""
    tap = Tap(server[0])
    yield tap, server[1]
    tap.close()


@pytest.fixture
def client(python: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """client(address, speculation="mtp") -> what CLIENT found with that Llama; no wishes: plain text only."""

    def run(address: str, **wishes: Any) -> dict[str, Any]:
        done = python(CLIENT, MODEL, address, json.dumps(wishes))
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


# ---- drafting ----


@pytest.mark.parametrize(
    "wishes",
    [
        {"speculation": "mtp"},
        {"speculation": "dflash", "drafter": DRAFTER},
        {"speculation": "tree", "draft_tokens": 6},
        pytest.param({"speculation": "ngram"}, marks=pytest.mark.slow),
        pytest.param({"speculation": "mtp", "offload_kqv": False}, marks=pytest.mark.slow),
    ],
    ids=["mtp", "dflash", "tree", "ngram", "kv-here"],
)
def test_a_server_stays_alive_with_a_speculating_client(tapped, client, wishes):
    tap, process = tapped
    found = client(tap.address, **wishes)
    assert found["drafted"] > 0
    assert found["accepted"] > 0
    assert found["agreement"] >= 0.95
    assert found["snapshots"] == wishes.get("draft_tokens", 4)
    assert (found["trees"], found["refusal"] != "") == (0, True), "a chain, and the reason is said"
    assert client(tap.address)["off"] == found["off"], "and serves a second client"
    assert process.poll() is None
    assert tap.error is None
    assert {"MUL_MAT", "MUL_MAT_ID", "SSM_CONV", "GATED_DELTA_NET"} <= tap.ops, "every layer ran there"
    assert not [op for op in tap.ops if "CUSTOM" in op]


@pytest.mark.parametrize(
    "n_gpu_layers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_no_op_of_ours_leaves_where_the_state_stays(tapped, client, n_gpu_layers):
    """The output, the MTP block, the last attention layer are on the server; recurrent layers are not."""
    tap, process = tapped
    found = client(tap.address, speculation="mtp", n_gpu_layers=n_gpu_layers)
    assert found["accepted"] > 0
    assert found["agreement"] >= 0.95
    assert process.poll() is None
    assert tap.error is None
    assert "MUL_MAT" in tap.ops
    assert not {"SSM_CONV", "GATED_DELTA_NET"} & tap.ops
    assert not [op for op in tap.ops if "CUSTOM" in op]


def test_one_process_with_two_models_on_a_server(server, python):
    address, process = server
    done = python(
        """
        import pickle, sys, warnings
        from draftwood import Llama
        settings = dict(n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, n_gpu_layers=-1)
        first = Llama(sys.argv[1], rpc_servers=sys.argv[2], speculation="mtp", **settings)
        second = pickle.loads(pickle.dumps(first))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # layers that stay on the CPU
            here = Llama(sys.argv[1], speculation="mtp", **settings)  # and one that knows of no server
        prompt = first.tokenize(b"def main")
        def text(llm): return [t for t, _ in zip(llm.generate(prompt, temp=0), range(30))]
        expected = text(first)
        first.close()
        assert text(second) == expected
        second.close()
        third = Llama(sys.argv[1], rpc_servers=sys.argv[2], speculation="mtp", **settings)
        assert text(third) == expected
        print([llm.context_params.n_rs_seq for llm in (third, here)], bool(here.model_params.devices))
        """,
        MODEL,
        address,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("[4, " if cards() else "[4, 0] False")
    assert process.poll() is None


@pytest.mark.filterwarnings("ignore:found n_gpu_layers=-1")
def test_layers_that_no_device_takes_do_not_cost_the_tree_ops(gguf):
    """The RPC backend is in every build; that alone was taken for a card, and brought snapshots."""
    if cards():
        pytest.skip("this machine has a card")
    llm = Llama(gguf("planted-moe"), n_gpu_layers=-1, n_ctx=64, verbose=False, speculation="mtp")
    assert llm.context_params.n_rs_seq == 0
    llm.close()


# ---- the command line ----


def draftwood(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwood", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_run_on_a_server(server):
    options = ["run", MODEL, "def main", "--raw", "-n", "30", "--temp", "0", "--threads", "1", "--json"]
    wishes = ["--rpc", server[0], "--n-gpu-layers", "-1", "--speculation", "mtp"]
    done = draftwood(*options, *wishes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == 30
    assert found["stats"]["accepted"] > 0
    assert server[1].poll() is None
    done = draftwood(*options, "--rpc", server[0])
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"beside --n-gpu-layers 0.*\n\nhint: --n-gpu-layers -1", done.stderr)


def test_doctor_says_why_rounds_are_chains(server):
    options = ["doctor", MODEL, "--n-gpu-layers", "-1"]
    done = draftwood(*options, "--rpc", server[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"device +RPC0: {server[0]}, GPU", done.stdout)
    chains = "rounds are chains, with 8 snapshots of the recurrent state: n_gpu_layers=-1 puts layers on RPC0"
    assert re.search(rf"no +draft trees: {chains}.*, without the tree ops", done.stdout)
    assert server[1].poll() is None
    server[1].kill()
    server[1].wait()
    done = draftwood(*options, "--rpc", server[0])
    assert done.returncode == 1
    assert f"broken: no RPC server answers at {server[0]}" in done.stdout


# ---- what goes wrong ----


@pytest.mark.parametrize(
    "servers", ["", "localhost", "localhost:", ":1", "a:0", "a:65536", "a:1,", "a:b:1", 5]
)
def test_what_is_no_list_of_servers(servers):
    with pytest.raises(OptionError, match=r"rpc_servers is .*; expected host:port"):
        Llama(MODEL, n_gpu_layers=-1, rpc_servers=servers)


def test_the_protocol_is_that_of_the_bundled_server(server):
    answer = rpc._exchange(server[0], rpc._HELLO)
    assert rpc._ANSWER.unpack(answer)[1:3] == rpc.PROTOCOL


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b"])
def test_nobody_listens(host):
    with pytest.raises(ServerError, match=f"no RPC server answers at {host}") as caught:
        Llama(MODEL, n_gpu_layers=-1, rpc_servers=f"{host}:{free_port()}")
    assert caught.value.hint == f"{program('ggml-rpc-server')} --host HOST --port PORT"


def test_a_busy_server_is_left_in_peace(server):
    """Greeted by a client that does not wait for the answer, it would be ended by SIGPIPE."""
    address, process = server
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as other:
        other.sendall(rpc._HELLO)
        assert other.recv(64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc, "PATIENCE", 0.3)
            with pytest.raises(ServerError, match=r"is silent for .* one client at a time"):
                Llama(MODEL, n_gpu_layers=-1, rpc_servers=address)
    rpc.greet(address)
    assert process.poll() is None, signal.Signals(-process.returncode)


@contextmanager
def pretending(*answers: bytes) -> Iterator[str]:
    """Give each message of a connection the next of these answers, then end the connection."""

    def run() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            with client, client.makefile("rb") as stream:
                for answer in answers:
                    if not (head := stream.read(9)):
                        break
                    stream.read(struct.unpack("<BQ", head)[1])
                    client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def hello(major: int, minor: int = 0) -> bytes:
    return rpc._ANSWER.pack(rpc._ANSWER.size - 8, major, minor, 0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (hello(rpc.PROTOCOL[0] - 1), r"speaks protocol 6\.0\.0; expected 7\.0 or older"),
        (hello(rpc.PROTOCOL[0], rpc.PROTOCOL[1] + 1), r"speaks protocol 7\.1\.0"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no ggml RPC server of this version: b'HTTP"),
        (b"x" * 1000, "is no ggml RPC server"),
        (b"", "is no ggml RPC server of this version: b''"),
    ],
    ids=["older", "newer", "http", "long", "nothing"],
)
def test_another_kind_of_server(answer, words):
    with pretending(answer) as address, pytest.raises(ServerError, match=words):
        Llama(MODEL, n_gpu_layers=-1, rpc_servers=address)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "has no devices"), (40, r"found 4\d devices .* at most 1\d")]
)
def test_a_server_of_no_or_too_many_devices(python, count, words):
    devices = struct.pack("<QI", 4, count)
    with pretending(hello(*rpc.PROTOCOL), devices) as address:
        done = python(
            "import sys, draftwood; draftwood.Llama(sys.argv[1], n_gpu_layers=-1, rpc_servers=sys.argv[2])",
            MODEL,
            address,
        )
    assert done.returncode == 1, done.stderr
    assert re.search(f"Error: .*{words}", done.stderr)
