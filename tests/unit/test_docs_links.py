"""Links between the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"]


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(there), f"{target} is no heading"


def test_each_page_is_linked():
    linked = "".join(each.read_text("utf-8") for each in PAGES)
    assert [
        each.name for each in (ROOT / "docs").glob("*.md") if not re.search(rf"[(/]{each.name}[)#]", linked)
    ] == []


def test_the_index_has_a_row_for_each_page():
    index = ROOT / "docs" / "README.md"
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| [^|]+ \| [^|]+ \|$", index.read_text("utf-8"), re.M)
    assert [name for name, target in rows if name != target] == []
    assert sorted(name for name, _ in rows) == sorted(
        each.name for each in (ROOT / "docs").glob("*.md") if each != index
    )
    assert len(index.read_text("utf-8").splitlines()) <= 40
