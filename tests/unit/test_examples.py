"""How the examples are called. tests/compat/test_examples.py runs them with the packages that they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNNABLE = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name != "serving.py"]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
@pytest.mark.parametrize("arguments", [[], ["model.gguf"]])
def test_too_few_arguments_give_the_usage(path, arguments):
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"usage: python examples/{path.name} MODEL.gguf ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_the_readme_says_how_to_run_each(path):
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text("utf-8")


def test_the_readme_names_what_is_to_be_installed():
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    for file in EXAMPLES.glob("requirements*.txt"):
        for name in re.findall(r"^([\w-]+)[=>]=", file.read_text("utf-8"), re.MULTILINE):
            assert re.search(rf"(?<![\w-]){name}(?![\w-])", readme), f"{name} of {file.name}"


def test_what_a_package_says_of_itself_is_explained_where_it_is_imported():
    """langchain-community warns on import; whoever follows the warning to the line finds the reason there."""
    warned = [path for path in RUNNABLE if "langchain_community" in path.read_text("utf-8")]
    assert warned
    for path in warned:
        lines = path.read_text("utf-8").splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("from langchain_community"))
        assert "DeprecationWarning" in lines[at - 2], path.name
    assert "`langchain-community` gives a DeprecationWarning" in (EXAMPLES / "README.md").read_text("utf-8")
