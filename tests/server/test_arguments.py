"""--spec-type of llama-server: our types beside llama.cpp's, and what they refuse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from draftwood.cli.serve import program
from synth_gguf import PRESETS, write

from tests.model.rig import write_llama
from tests.server.process import DRAFTER, MODEL, Server


def ended(tmp_path: Path, *flags: str, model: str = MODEL, prefix: tuple[str, ...] = ()) -> str:
    """What a server says that ends by itself, with an error."""
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", *flags, model=model, prefix=prefix)
    try:
        assert server.process.wait(60) != 0
    finally:
        server.close()
    return server.words()


@pytest.fixture(scope="module")
def no_mtp(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama") / "llama.gguf"
    write_llama(path, like=MODEL)
    return str(path)


def test_types_are_listed_beside_llama_cpps() -> None:
    run = subprocess.run([program("llama-server"), "--help"], capture_output=True, text=True, check=True)
    assert "auto,mtp,dflash,ngram,tree,plain,none," in run.stdout
    assert "draft-mtp" in run.stdout


def test_an_unknown_type_is_refused_by_llama_cpp(tmp_path: Path) -> None:
    assert "unknown speculative type: mpt" in ended(tmp_path, "--spec-type", "mpt")


def test_mtp_without_a_block_says_so(tmp_path: Path, no_mtp: str) -> None:
    words = ended(tmp_path, "--spec-type", "mtp", model=no_mtp)
    assert "--spec-type mtp cannot run" in words
    assert "no MTP block" in words


def test_dflash_without_a_drafter_says_so(tmp_path: Path) -> None:
    assert "needs a drafter; expected -md DRAFTER.gguf" in ended(tmp_path, "--spec-type", "dflash")


def test_a_drafter_beside_ngram_is_refused(tmp_path: Path) -> None:
    assert "takes no drafter" in ended(tmp_path, "--spec-type", "ngram", "-md", DRAFTER)


def test_auto_without_an_mtp_block_is_llama_cpps_on_a_cpu(tmp_path: Path) -> None:
    """On a card it is plain: tests/gpu/test_surroundings.py."""
    path = tmp_path / "hybrid.gguf"
    write(PRESETS["moe-plain"], path)
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", "auto", model=str(path))
    try:
        assert server.wait().complete("a", n_predict=4)["tokens_predicted"] > 0
        assert "decoding is llama.cpp's alone" in server.words()
        assert "nothing is drafted" not in server.words()
    finally:
        server.close()


def test_auto_leaves_other_architectures_to_llama_cpp(tmp_path: Path, no_mtp: str) -> None:
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", "auto", model=no_mtp)
    try:
        server.wait()
        assert server.complete("a", n_predict=4)["tokens_predicted"] > 0
        assert "decoding is llama.cpp's alone" in server.words()
        assert server.get("/slots")[0]["speculative"] is False
    finally:
        server.close()


def test_auto_leaves_split_tensors_to_llama_cpp(tmp_path: Path) -> None:
    """Without a card llama.cpp then loads nothing; what drafts is decided before."""
    words = ended(tmp_path, "--spec-type", "auto", "--split-mode", "tensor", "-ngl", "99")
    assert "decoding is llama.cpp's alone: with --split-mode tensor llama.cpp keeps one graph" in words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-ub", "8"), "1 slots draft as --spec-type auto, up to 6 tokens"),
        (("-b", "5"), "1 slots draft as --spec-type auto, up to 3 tokens"),
        (("-c", "12"), "1 slots draft as --spec-type auto, up to 8 tokens"),
        (("-c", "7", "-np", "2"), "2 slots draft as --spec-type auto, up to 5 tokens each"),
        (("-b", "2"), "found room for 2 rows in a decode; drafts need 3: decoding plainly"),
    ],
)
def test_auto_drafts_what_a_small_batch_or_context_has_room_for(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", "auto", *flags)
    try:
        server.wait()
        assert server.complete("a", n_predict=6)["tokens_predicted"] > 0
        assert words in server.words()
    finally:
        server.close()


def test_a_drafter_that_is_none_of_ours_is_said(tmp_path: Path) -> None:
    """llama.cpp drafts with it then."""
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", "auto", "-md", MODEL)
    try:
        server.wait()
        lines = [line for line in server.words().splitlines() if "decoding is llama.cpp's alone" in line]
        assert len(lines) == 1
        assert " W " in lines[0]
    finally:
        server.close()


def test_draft_mtp_stays_llama_cpps(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", "draft-mtp")
    try:
        server.wait()
        assert server.complete("Once upon a time")["timings"]["draft_n"] > 0
        assert "draftwood: 1 slots" not in server.words()
    finally:
        server.close()


def test_embeddings_are_llama_cpps(tmp_path: Path) -> None:
    vectors = []
    for kind in ("auto", "plain", "none"):
        flags = ("--embedding", "--pooling", "mean", "--no-repack", "--spec-type", kind)
        server = Server(tmp_path / kind, "-c", "512", "-np", "1", *flags)
        try:
            server.wait()
            vectors.append(
                server.post("/v1/embeddings", {"input": "The quick brown fox"})["data"][0]["embedding"]
            )
        finally:
            server.close()
    assert vectors[0] == vectors[1] == vectors[2]
    assert len(vectors[0]) > 1
