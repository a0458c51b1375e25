"""Where the weights of a server lie decides who gets room for steps that are queued: a state more a slot.

An RPC server stands for a card without token embeddings. Contract: src/server/placement.h.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model.test_rpc import serving
from tests.server.process import Server


@pytest.mark.parametrize("slots", [("-np", "1"), ("-np", "3", "--kv-unified")], ids=["one", "several"])
def test_no_room_for_steps_where_embeddings_stay_on_the_host(tmp_path: Path, slots: tuple[str, ...]) -> None:
    with serving() as (address, _):
        server = Server(tmp_path / "log", *slots, "-c", "512", "--spec-type", "plain", "--rpc", address, "-v")
        try:
            words = server.wait().words()
        finally:
            server.close()
    assert "llama_memory_recurrent: RPC0" in words
    assert set(re.findall(r"n_seq_max +=\s+(\d+)", words)) == {slots[1]}
