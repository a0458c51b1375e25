"""Fetch the pinned packages, build the training tokens and tokenizer, and choose the held-out text.

Must not know: torch, the model. Sources and licences are in sources.toml; no training text is committed.
Usage: python -m tools.tiny_moe.corpus fetch|build|check WORK_FOLDER
  fetch  pip-downloads every source by hash into WORK_FOLDER/archives
  build  writes WORK_FOLDER/{tokens.npy,docs.json} and models/tiny-moe/{tokenizer.json,heldout/*.jsonl}
  check  tells whether committed held-out text shares a 13-gram with the training text
Tests: tests/model/test_tiny_moe_corpus.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tools.tiny_moe.text import CATEGORIES, Document, documents, grams

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "tiny-moe"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
# The qwen35 split of llama.cpp (src/llama-vocab.cpp at the pin); the GGUF names it, so both must cut alike.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAP = {"python": 1_250_000, "prose": 3_000_000, "json": 6_500_000}  # characters of one package
HELD = {"chars": 2500, "records": 46}  # of one category
CHAT = {
    "python": ("Write the Python module {path}.", "Show me the source of {name} in {package}."),
    "prose": ("Write the documentation page {path}.", "Explain this part of {package}: {name}."),
    "json": ("Write the file {path}.", "Show me {name} of {package}."),
}


@dataclass(frozen=True)
class Source:
    """One pinned archive of sources.toml."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str
    split: str


def sources(path: Path = HERE / "sources.toml") -> list[Source]:
    """Read the pinned sources, in the order of the file."""
    return [Source(**entry) for entry in tomllib.loads(path.read_text("utf-8"))["package"]]


def fetch(folder: Path) -> None:
    """Download every missing archive with pip and check its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch_one, [folder] * len(sources()), sources()))


def fetch_one(folder: Path, s: Source) -> None:
    """Make sure of one archive; a wheel is asked for by its own tags, whatever Python runs this."""
    path = folder / s.file
    if not path.exists():
        how = [f"--no-binary={s.name}"]
        if s.file.endswith(".whl"):
            tags = s.file.removesuffix(".whl").split("-")[-1].split(".")
            how = [
                "--only-binary=:all:",
                "--python-version=3.11",
                *(f"--platform={t}" for t in tags if t != "any"),
            ]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "-d", str(folder), *how, f"{s.name}=={s.version}"], check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != s.sha256:
        raise ValueError(
            f"`{s.file}` has sha256 {found}, expected {s.sha256}\n\nhint: delete `{path}` and fetch again"
        )


def package_documents(folder: Path, s: Source) -> list[Document]:
    """Return the documents of one source within the caps, files in an order that only their paths decide."""
    docs = list(documents(s.name, folder / s.file, set()))
    docs.sort(key=lambda d: hashlib.sha256(d.path.encode()).digest())
    left, kept = dict(CAP), []
    for d in docs:
        if left[d.category] > 0:
            left[d.category] -= len(d.text)
            kept.append(d)
    return kept


def split_documents(folder: Path, split: str) -> list[Document]:
    """Return all documents of a split ("train" or "heldout"), equal texts once."""
    chosen = [s for s in sources() if s.split == split]
    seen: set[str] = set()
    out = []
    with ProcessPoolExecutor() as pool:
        for docs in pool.map(package_documents, [folder] * len(chosen), chosen):
            for d in docs:
                key = "".join(d.text.split())
                digest = hashlib.sha256(key.encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    out.append(d)
    return out


def shared_grams(texts: Iterable[str], wanted: set[str]) -> set[str]:
    """Return which of the wanted 13-grams occur in the texts."""
    found: set[str] = set()
    for text in texts:
        found.update(wanted.intersection(grams(text)))
    return found


def pieces(docs: Iterable[Document]) -> Iterator[Document]:
    """Cut documents into held-out records of about HELD["chars"] at line ends, at most two of one file."""
    for d in docs:
        lines, piece, n = d.text.splitlines(keepends=True), "", 0
        for line in lines:
            piece += line
            if len(piece) >= HELD["chars"]:
                yield Document(d.package, d.path, d.category, piece)
                piece, n = "", n + 1
                if n == 2:
                    break


def choose_heldout(folder: Path, train: list[Document]) -> list[Document]:
    """Pick held-out records that share no 13-gram with the training text, evenly over packages."""
    rng = random.Random(0)
    queues: dict[tuple[str, str], list[Document]] = {}
    for d in pieces(split_documents(folder, "heldout")):
        if len(d.text) < 1.3 * HELD["chars"]:
            queues.setdefault((d.category, d.package), []).append(d)
    for q in queues.values():
        rng.shuffle(q)
        del q[300:]
    wanted = {g for q in queues.values() for d in q for g in grams(d.text)}
    bad = shared_grams((d.text for d in train), wanted)
    out = []
    for c in CATEGORIES:
        clean = [
            [d for d in q if bad.isdisjoint(grams(d.text))]
            for (kind, _), q in sorted(queues.items())
            if kind == c
        ]
        turns = [d for i in range(max(map(len, clean))) for q in clean if i < len(q) for d in (q[i],)]
        out += list(islice(turns, HELD["records"]))
    return out


def write_heldout(docs: list[Document], folder: Path) -> None:
    """Write one jsonl per category, each line with its source."""
    version = {s.name: s.version for s in sources()}
    folder.mkdir(parents=True, exist_ok=True)
    for c in CATEGORIES:
        rows = [asdict(d) | {"version": version[d.package]} for d in docs if d.category == c]
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        (folder / f"{c}.jsonl").write_text(text, "utf-8")


def read_heldout(folder: Path = MODEL / "heldout") -> list[dict[str, str]]:
    """Read the committed held-out records of all categories."""
    return [
        json.loads(x) for c in CATEGORIES for x in (folder / f"{c}.jsonl").read_text("utf-8").splitlines()
    ]


def make_tokenizer(texts: Iterable[str]) -> Any:
    """Train the byte-level BPE of 4,096 entries, special tokens first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet)
    )
    t.train_from_iterator(texts, trainer)
    return t


def framed(d: Document, rng: random.Random) -> tuple[str | None, str]:
    """Return (request or None, text): about one short document in six becomes a chat."""
    if len(d.text) > 8000 or rng.random() > 1 / 6:
        return None, d.text
    ask = rng.choice(CHAT[d.category])
    return ask.format(path=d.path, name=Path(d.path).name, package=d.package), d.text


def encode(docs: list[Document], tokenizer: Any) -> Any:
    """Return u16 [n] of all documents in a seeded random order, each closed by its end token."""
    import numpy as np

    rng = random.Random(1)
    docs = rng.sample(docs, len(docs))
    end, start, stop, _ = range(4)
    nl, user, assistant = (tokenizer.encode(x).ids for x in ("\n", "user\n", "assistant\n"))
    out = []
    for at in range(0, len(docs), 2000):
        frames = [framed(d, rng) for d in docs[at : at + 2000]]
        bodies = tokenizer.encode_batch_fast([text for _, text in frames])
        for (ask, _), body in zip(frames, bodies, strict=True):
            if ask is None:
                ids = [*body.ids, end]
            else:
                ids = [
                    start,
                    *user,
                    *tokenizer.encode(ask).ids,
                    stop,
                    *nl,
                    start,
                    *assistant,
                    *body.ids,
                    stop,
                    *nl,
                ]
            out.append(np.array(ids, np.uint16))
    return np.concatenate(out)


def build(work: Path) -> None:
    """Build everything from the fetched archives; two runs give the same bytes."""
    import numpy as np

    train = split_documents(work / "archives", "train")
    write_heldout(choose_heldout(work / "archives", train), MODEL / "heldout")
    sample = random.Random(2).sample(train, len(train) // 6)
    tokenizer = make_tokenizer(d.text for d in sample)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    tokens = encode(train, tokenizer)
    np.save(work / "tokens.npy", tokens)
    chars = {c: sum(len(d.text) for d in train if d.category == c) for c in CATEGORIES}
    note = {
        "documents": len(train),
        "chars": chars,
        "tokens": len(tokens),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    (work / "corpus.json").write_text(json.dumps(note, indent=2) + "\n", "utf-8")
    print(json.dumps(note, indent=2))


def check(work: Path) -> set[str]:
    """Return the 13-grams that the committed held-out text shares with the training text."""
    wanted = {g for r in read_heldout() for g in grams(r["text"])}
    return shared_grams((d.text for d in split_documents(work / "archives", "train")), wanted)


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("fetch", "build", "check"))
    p.add_argument("work", type=Path)
    a = p.parse_args()
    if a.command == "fetch":
        fetch(a.work / "archives")
    elif a.command == "build":
        build(a.work)
    elif shared := check(a.work):
        sys.exit(
            f"{len(shared)} 13-grams of the held-out text are in the training text, such as `{min(shared)}`"
        )


if __name__ == "__main__":
    main()
