"""tiny-moe's corpus: pinned and permissive sources, held-out text apart from training, cleaning, the card.

That the held-out text shares no 13-gram with the training text needs that text: `make corpus-check` downloads
its sources. No committed index could stand in for it: 25 million 13-grams do not fit in a small file, and a
sample would prove nothing. Here is what can be checked on committed data, and that a shared 13-gram is found.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest

if sys.version_info < (3, 11):
    pytest.importorskip("tomli", reason="tomli reads sources.toml on Python 3.10")

from tools.tiny_moe import corpus, text

PERMISSIVE = {"MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0"}


def test_sources_are_pinned_and_permissive() -> None:
    sources = corpus.sources()
    assert {s.licence for s in sources} <= PERMISSIVE
    assert all(re.fullmatch(r"[0-9a-f]{64}", s.sha256) for s in sources)
    assert {s.split for s in sources} == {"train", "heldout"}
    names = Counter(s.name.lower().replace("_", "-") for s in sources)
    assert max(names.values()) == 1, "a package may be in one split only"


def test_heldout_is_from_heldout_packages() -> None:
    versions = {s.name: s.version for s in corpus.sources() if s.split == "heldout"}
    records = corpus.read_heldout()
    assert {(r["package"], r["version"]) for r in records} <= set(versions.items())
    assert len({r["text"] for r in records}) == len(records)


def test_heldout_is_small_and_enough() -> None:
    files = list((corpus.MODEL / "heldout").iterdir())
    assert sum(f.stat().st_size for f in files) <= 400_000
    records = corpus.read_heldout()
    for category in text.CATEGORIES:
        # 256 tokens at under 5 characters a token; accept.py checks the true number
        long = [r for r in records if r["category"] == category and len(r["text"]) >= 1280]
        assert len(long) >= 24


def test_card_lists_every_source_and_its_licence() -> None:
    card = (corpus.MODEL / "README.md").read_text("utf-8")
    rows = set(re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (train|heldout) \|$", card, re.M))
    assert rows == {(s.name, s.version, s.licence, s.split) for s in corpus.sources()}


def test_grams_are_runs_of_thirteen_words() -> None:
    words = [f"W{i}" for i in range(15)]
    found = list(text.grams("  ".join(words[:7]) + ",\n" + "; ".join(words[7:])))
    assert found == [" ".join(words[i : i + 13]).lower() for i in range(3)]
    assert not list(text.grams("twelve words " * 6))


def test_a_shared_gram_is_found() -> None:
    quoted = "one two three four five six seven eight nine ten eleven twelve thirteen"
    wanted = set(text.grams(f"Start. {quoted} end"))
    assert corpus.shared_grams(["nothing here", f"X {quoted.upper()}!"], wanted) == {quoted}
    assert not corpus.shared_grams([quoted.replace("seven", "7")], wanted)


@pytest.mark.parametrize(
    ("path", "category"),
    [
        ("pkg/mod.py", "python"),
        ("docs/guide.rst", "prose"),
        ("docs/ref/models.txt", "prose"),
        ("data/words.txt", None),
        ("conf/app.yaml", "json"),
        ("data/api.json.gz", "json"),
        ("pkg/_vendor/six.py", None),
        ("LICENSE.md", None),
        ("pkg/locale/de/x.json", None),
        ("translations/de.json", None),
        ("translations/en.json", "json"),
        ("pkg/picture.png", None),
    ],
)
def test_category(path: str, category: str | None) -> None:
    assert text.category(path) == category


def test_cleaning_drops_what_teaches_loops() -> None:
    code = "".join(f"def function_{'abcdefghij'[i]}(value):\n    return value + other\n" for i in range(10))
    licence = "# Copyright somebody\n# Licensed under the Apache License\n\n"
    assert text.clean(licence + code, "python") == code
    assert text.clean("x = 1\n", "python") is None  # tiny
    assert text.clean("[" + "1234567890, " * 200 + "]\n", "python") is None  # a table of numbers
    assert text.clean("same line\n" * 200, "prose") is None
    assert text.clean("слово " * 100, "prose") is None
    minified = '{"name": "' + "word " * 100 + '", "more": {"a": "b", "c": "' + "text " * 100 + '"}}'
    pretty = text.clean(minified, "json")
    assert pretty is not None
    assert pretty.startswith('{\n  "name": ')
