"""tools/borrow.py: a package with what it requires is copied, and works there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def borrow(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "borrow.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_package_comes_with_what_it_requires_and_nothing_else(tmp_path):
    done = borrow(tmp_path, "Jinja2")
    assert done.returncode == 0, done.stderr
    assert {name.partition("==")[0].lower() for name in done.stdout.split()} == {"jinja2", "markupsafe"}
    code = "import jinja2, markupsafe, sys; print(jinja2.__file__, markupsafe.__file__); import numpy"
    ran = subprocess.run(
        [tmp_path / "bin" / "python", "-c", code], capture_output=True, text=True, check=False
    )
    assert [Path(each).is_relative_to(tmp_path) for each in ran.stdout.split()] == [True, True]
    assert "No module named 'numpy'" in ran.stderr


def test_a_package_that_is_not_there_is_named(tmp_path):
    done = borrow(tmp_path / "env", "no-such-package")
    assert done.returncode == 1
    assert done.stderr.startswith("found no no-such-package beside")
    assert not (tmp_path / "env").exists()
