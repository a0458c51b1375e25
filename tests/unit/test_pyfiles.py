"""Staging llama-cpp-python's Python files: only imports change, and they bind what they bound before."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pyfiles
import pytest
import source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sdist() -> Path:
    return source.ensure_source(ROOT).path


@pytest.fixture(scope="module")
def staged(sdist, tmp_path_factory) -> Path:
    dest = tmp_path_factory.mktemp("stage") / "_llama_cpp"
    pyfiles.stage(sdist, dest)
    return dest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import llama_cpp", "import draftwood._llama_cpp as llama_cpp"),
        ("import llama_cpp as lc", "import draftwood._llama_cpp as lc"),
        ("import llama_cpp.x as y", "import draftwood._llama_cpp.x as y"),
        ("import llama_cpp.x",
         "import draftwood._llama_cpp.x as llama_cpp, draftwood._llama_cpp as llama_cpp"),
        ("import os, llama_cpp.x as y, sys", "import os, draftwood._llama_cpp.x as y, sys"),
        ("import llama_cpp; import llama_cpp.x as y  # both",
         "import draftwood._llama_cpp as llama_cpp; import draftwood._llama_cpp.x as y  # both"),
        ("from llama_cpp import Llama", "from draftwood._llama_cpp import Llama"),
        ("from llama_cpp.x.y import (\n    a,  # kept\n    b as c,\n)",
         "from draftwood._llama_cpp.x.y import (\n    a,  # kept\n    b as c,\n)"),
        ("é = 'ä'; from llama_cpp.x import *",
         "é = 'ä'; from draftwood._llama_cpp.x import *"),
    ],
)  # fmt: skip
def test_every_form_of_import(before, after):
    assert pyfiles.rewrite(before.encode(), "case.py")[0].decode() == after


@pytest.mark.parametrize(
    "text",
    [
        "from . import llama_cpp",
        "from .llama_cpp import x",
        "import llama_cpp_agent",
        "from llama_cpp_agent import llama_cpp",
        '"""\nimport llama_cpp\n"""',
        "# import llama_cpp",
        "x = 'from llama_cpp import Llama'",
        "log(llama_cpp.llama.Llama, 'llama_cpp.server')",
    ],
)
def test_everything_else_is_left_alone(text):
    assert pyfiles.rewrite(text.encode(), "case.py") == (text.encode(), 0)


@pytest.mark.parametrize(
    "text",
    [
        "from  llama_cpp import x",
        "from llama_cpp \\\n    import x",
        "import llama_cpp.x as y, \\\n    os",
        "importlib.import_module('llama_cpp.x')",
        "__import__('llama_cpp')",
    ],
)
def test_what_is_not_foreseen_stops_the_build_and_says_where(text):
    with pytest.raises(pyfiles.StageError, match=r"case\.py:2: .*expected"):
        pyfiles.rewrite(b"x = 1\n" + text.encode(), "case.py")


def test_the_pinned_files_change_in_imports_and_library_names_only(sdist, staged):
    report = pyfiles.stage(sdist, staged)
    assert report == pyfiles.EXPECTED
    imports, others = 0, set()
    for path in staged.rglob("*.py"):
        new = path.read_bytes()
        old = (sdist / "llama_cpp" / path.relative_to(staged)).read_bytes()
        assert new.count(b"\n") == old.count(b"\n")
        differing = [b for a, b in zip(old.splitlines(), new.splitlines(), strict=True) if a != b]
        imports += sum(line.split()[0] in (b"import", b"from") for line in differing)
        others |= {line.strip().decode() for line in differing if line.split()[0] not in (b"import", b"from")}
        # by this test's own eyes, not by the helper under test
        for node in ast.walk(ast.parse(new)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] == "llama_cpp"], path
    assert imports == report.statements
    assert others == {
        '_lib_base_name = "draftwood-llama"',
        '_override_base_path = os.environ.get("DRAFTWOOD_LIB_PATH")',
        '_libmtmd_base_name = "draftwood-mtmd"',
        '_libmtmd_override_path = os.environ.get("DRAFTWOOD_LIB_PATH")',
        'libggml = ctypes_ext.load_shared_library("draftwood-ggml", libggml_base_path)',
    }


def test_a_second_run_changes_nothing_and_removes_what_is_stale(sdist, staged):
    stale, foreign = staged / "server" / "gone.py", staged / "lib" / "libllama.so"
    foreign.parent.mkdir(exist_ok=True)
    before = _stamps(staged)
    stale.write_text("x = 1\n")
    foreign.write_bytes(b"")
    pyfiles.stage(sdist, staged)
    assert not stale.exists()
    assert foreign.exists()
    foreign.unlink()
    assert _stamps(staged) == before


def test_other_content_gets_another_mtime(tmp_path):
    times = []
    for text in ("x = 1\n", "x = 2\n"):  # same size: an equal mtime would leave a stale .pyc in force
        _tree(tmp_path / "sdist", {"__init__.py": text})
        pyfiles.stage(tmp_path / "sdist", tmp_path / "out", expected=None)
        times.append((tmp_path / "out" / "__init__.py").stat().st_mtime)
    assert times[0] != times[1]


def test_wrong_counts_and_an_empty_folder_are_refused(tmp_path):
    _tree(tmp_path, {"__init__.py": "import llama_cpp\n"})
    with pytest.raises(pyfiles.StageError, match=r"copied=1.*expected.*statements=39"):
        pyfiles.stage(tmp_path, tmp_path / "out")
    _tree(tmp_path, {"mtmd_cpp.py": "_libmtmd_base_name = other\n"})
    with pytest.raises(pyfiles.StageError, match=r"mtmd_cpp\.py: found .* 0 times, expected once"):
        pyfiles.stage(tmp_path, tmp_path / "out")
    with pytest.raises(pyfiles.StageError, match=r"no Python files under .*expected an unpacked"):
        pyfiles.stage(tmp_path / "nowhere", tmp_path / "out")


def test_an_import_cycle_works_and_binds_what_it_bound_upstream(tmp_path):
    _tree(
        tmp_path / "sdist",
        {
            "__init__.py": "from .llama import *\n",
            "llama.py": "from .cache import size\nclass Llama: unit = 3\n",
            "cache.py": "import llama_cpp.llama\ndef size(): return llama_cpp.llama.Llama.unit\n",
        },
    )
    pyfiles.stage(tmp_path / "sdist", tmp_path / "out" / "draftwood" / "_llama_cpp", expected=None)
    (tmp_path / "out" / "draftwood" / "__init__.py").write_text("")
    code = """if 1:
        import json, sys
        import {0} as package
        public = lambda module: sorted(name for name in vars(module) if name[0] != "_")
        touched = "llama_cpp" in sys.modules
        print(json.dumps([package.size(), public(package), public(package.cache), touched]))
    """
    results = []
    for folder, name in [("sdist", "llama_cpp"), ("out", "draftwood._llama_cpp")]:
        # -S: an editable install of draftwood would answer for the fake one
        command = [sys.executable, "-S", "-c", code.format(name)]
        results.append(json.loads(subprocess.check_output(command, cwd=tmp_path / folder)))
    upstream, ours = results
    assert ours[:3] == upstream[:3] == [3, ["Llama", "cache", "llama", "size"], ["llama_cpp", "size"]]
    assert ours[3] is False


def _tree(sdist: Path, files: dict[str, str]) -> None:
    (sdist / "llama_cpp").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (sdist / "llama_cpp" / name).write_text(text)


def _stamps(folder: Path) -> dict[str, tuple[bytes, float]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime) for p in folder.rglob("*") if p.is_file()}
