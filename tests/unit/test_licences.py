"""Every licence of vendor/README.md's table is put into the wheel by cmake/install.cmake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "vendor" / "README.md").read_text().partition("## Licences of what is fetched")[2]
ROWS = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("|")][2:]
TEXTS = [(row[0].strip(), text) for row in ROWS for text in re.findall(r"`([^`]+)`", row[2])]
INSTALLED = re.findall(
    r"^draftwood_licence(?:_in)?\((\S+)", (ROOT / "cmake" / "install.cmake").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("part", "text"), TEXTS)
def test_a_licence_is_installed(part, text):
    assert text in INSTALLED


def test_the_table_has_all():
    assert len(ROWS) == 11
    assert all(re.search("`[^`]+`", row[2]) for row in ROWS)
    assert sorted(INSTALLED) == sorted(text for _, text in TEXTS)
