"""The examples without LangChain: how they are called. tests/compat/test_examples.py runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("arguments", [[], ["model.gguf"]])
def test_too_few_arguments_give_the_usage(path, arguments):
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python examples/{path.name} MODEL.gguf ")
    assert done.stderr.count("\n") == 1


def test_the_readme_installs_what_is_there():
    assert "pip install . langchain-community" in (EXAMPLES / "README.md").read_text("utf-8")
