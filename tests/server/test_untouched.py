"""Scores of documents are llama.cpp's own. Replies behind images are drafted and are those of plain steps."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server
from tests.server.test_arguments import ended

# ---- scores ----

RANKED = {
    "query": "a machine that learns",
    "documents": ["The quick brown fox", "def add(a, b):", "learning machines are fun", "cats"],
}


def ranking(server: GetServer, spec_type: str) -> Server:
    return server("-np", "1", "-c", "512", "--reranking", "--spec-type", spec_type)


@pytest.mark.parametrize("spec_type", ["auto", "plain"])
def test_scores_are_llama_cpps(server: GetServer, spec_type: str) -> None:
    ours = ranking(server, spec_type)
    results = [each.post("/v1/rerank", RANKED)["results"] for each in (ours, ranking(server, "none"))]
    assert results[0] == results[1]
    assert len({each["relevance_score"] for each in results[0]}) == 4
    assert "decoding is llama.cpp's alone" in ours.words()
    assert "slots draft as" not in ours.words()
    assert ours.get("/slots")[0]["speculative"] is False


def test_documents_of_a_rerank_have_a_limit(server: GetServer) -> None:
    ours = ranking(server, "auto")
    body = {"query": "a", "documents": ["b"] * 2049}
    reply = requests.post(f"{ours.url}/v1/rerank", json=body, timeout=60)
    assert reply.status_code == 400
    assert "found 2049 prompts or documents in a request" in reply.json()["error"]["message"]


@pytest.mark.parametrize("what", ["--reranking", "--embedding"])
@pytest.mark.parametrize("spec_type", ["mtp", "tree", "ngram"])
def test_a_drafter_that_was_asked_for_is_refused(tmp_path: Path, spec_type: str, what: str) -> None:
    words = ended(tmp_path, what, "--spec-type", spec_type)
    assert f"--spec-type {spec_type} cannot run: contexts for embeddings generate no text" in words


# ---- images ----

WIDTH, PATCH, SIDE, BLOCKS, N_EMBD = 64, 16, 64, 2, 256  # the last one is tiny-moe's


def write_projector(path: Path) -> None:
    """Write a random vision tower of the kind that Qwen3.5 has, without deepstack layers."""
    chance = np.random.default_rng(0)
    out = gguf.GGUFWriter(path, "clip")
    out.add_string("clip.projector_type", "qwen3vl_merger")
    out.add_bool("clip.has_vision_encoder", True)
    out.add_bool("clip.use_gelu", True)
    out.add_vision_image_size(SIDE)
    out.add_vision_patch_size(PATCH)
    out.add_vision_embedding_length(WIDTH)
    out.add_vision_feed_forward_length(2 * WIDTH)
    out.add_vision_block_count(BLOCKS)
    out.add_vision_projection_dim(N_EMBD)
    out.add_vision_head_count(2)
    out.add_vision_attention_layernorm_eps(1e-6)
    out.add_vision_image_mean([0.5] * 3)
    out.add_vision_image_std([0.5] * 3)

    def add(name: str, *shape: int) -> None:
        out.add_tensor(name, (chance.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def add_linear(name: str, n_out: int, n_in: int) -> None:
        add(f"{name}.weight", n_out, n_in)
        add(f"{name}.bias", n_out)

    def add_norm(name: str) -> None:
        out.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        add(f"{name}.bias", WIDTH)

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.patch_embd.weight.1", WIDTH, 3, PATCH, PATCH)  # of a video's second frame
    add("v.patch_embd.bias", WIDTH)
    add("v.position_embd.weight", (SIDE // PATCH) ** 2, WIDTH)
    for i in range(BLOCKS):
        add_norm(f"v.blk.{i}.ln1")
        add_norm(f"v.blk.{i}.ln2")
        add_linear(f"v.blk.{i}.attn_qkv", 3 * WIDTH, WIDTH)
        add_linear(f"v.blk.{i}.attn_out", WIDTH, WIDTH)
        add_linear(f"v.blk.{i}.ffn_up", 2 * WIDTH, WIDTH)
        add_linear(f"v.blk.{i}.ffn_down", WIDTH, 2 * WIDTH)
    add_norm("v.post_ln")
    add_linear("mm.0", 4 * WIDTH, 4 * WIDTH)  # of two patches by two
    add_linear("mm.2", N_EMBD, 4 * WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def png(seed: int, side: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def image(seed: int, side: int = SIDE) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png(seed, side)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = {"max_tokens": 48, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    return {"messages": list(messages), **settings, **more}


def ask(server: Server, body: dict[str, Any]) -> Any:
    return server.post("/v1/chat/completions", body)


def text(reply: Any) -> str:
    return str(reply["choices"][0]["message"]["content"])


def seen(reply: Any) -> Any:
    """What a reply says, with its probabilities."""
    (choice,) = reply["choices"]
    rows = [
        (row["token"], row["logprob"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]])
        for row in choice["logprobs"]["content"]
    ]
    counts = [reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    return choice["message"]["content"], choice["finish_reason"], rows, counts


def accepted(*replies: Any) -> int:
    return sum(reply["timings"].get("draft_n_accepted", 0) for reply in replies)


# no two likeliest tokens of the replies are closer than 4%: llama.cpp's own kernels round otherwise
SEES = user(image(1), "Once upon a time")
READS = user("Once upon a time")
START = Callable[[str], Server]


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_projector(path)
    return str(path)


@pytest.fixture
def start(server: GetServer, projector: str) -> START:
    """start("mtp") -> a server with two slots that sees images."""
    flags = ("-np", "2", "-no-kvu", "-c", "4096", "--mmproj", projector)
    return lambda spec_type: server(*flags, "--spec-type", spec_type)


@pytest.fixture(params=["mtp", "tree", "auto"])
def drafting(request: pytest.FixtureRequest, start: START) -> Server:
    return start(request.param)


@pytest.fixture
def plain(start: START) -> Server:
    return start("plain")


def drafts(server: Server, *replies: Any) -> bool:
    return accepted(*replies) > 0 or server.spec_type == "auto"  # which need not on a loaded machine


def test_a_reply_behind_an_image_is_llama_cpps(drafting: Server, start: START) -> None:
    none = start("none")
    for message in (SEES, READS):
        reply = ask(drafting, chat(message, cache_prompt=False))
        assert text(reply) == text(ask(none, chat(message, cache_prompt=False)))
        assert drafts(drafting, reply)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_replies_behind_images_are_those_of_plain_steps(drafting: Server, plain: Server, how: Any) -> None:
    messages = [
        SEES,
        user(image(2), "Once upon a time"),
        user("look ", image(3, 96), " and ", image(4, 32)),
        READS,
    ]
    replies = []
    for message in messages:
        body = chat(message, cache_prompt=False, **how)
        replies.append(ask(drafting, body))
        assert seen(replies[-1]) == seen(ask(plain, body))
    assert drafts(drafting, *replies[:3])
    assert len({text(reply) for reply in replies}) == len(messages), "the images make a difference"


def test_the_turn_behind_an_image(drafting: Server, plain: Server) -> None:
    body = chat(SEES, id_slot=0)
    said = {"role": "assistant", "content": text(ask(drafting, body))}
    body = chat(SEES, said, user("And then"), id_slot=0)
    reply = ask(drafting, body)
    assert reply["timings"]["cache_n"] > 50, "the image was not kept"
    assert seen(reply) == seen(ask(plain, {**body, "cache_prompt": False}))
    assert drafts(drafting, reply)


def test_a_saved_image_goes_on_elsewhere(drafting: Server, plain: Server) -> None:
    said = {"role": "assistant", "content": text(ask(drafting, chat(SEES, id_slot=0)))}
    saved = drafting.post("/slots/0?action=save", {"filename": "image.bin"})
    ask(drafting, chat(READS, id_slot=0))
    restored = drafting.post("/slots/1?action=restore", {"filename": "image.bin"})
    assert restored["n_restored"] == saved["n_saved"]
    body = chat(SEES, said, user("And then"), id_slot=1)
    reply = ask(drafting, body)
    assert reply["timings"]["cache_n"] > 50
    assert seen(reply) == seen(ask(plain, {**body, "cache_prompt": False}))


def test_images_and_texts_side_by_side(drafting: Server, plain: Server) -> None:
    bodies = [
        chat(user(*([image(i)] if i % 2 else []), f"Once upon a time {i}"), cache_prompt=False)
        for i in range(6)
    ]
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda body: ask(drafting, body), bodies))
    assert [seen(reply) for reply in replies] == [seen(ask(plain, body)) for body in bodies]
    assert drafts(drafting, *replies)
