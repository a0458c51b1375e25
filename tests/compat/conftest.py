"""Wheels and throw-away environments for the coexistence tests.

Tests of draftwood beside llama-cpp-python run twice: with fakes, fast, in `make test`, and with the built
wheels in `make test-full`. A fake holds all of the real Python files over a library of empty functions.
Must not know: what any test expects. pip and venv do the installing, no code of ours stands in for them.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyfiles
import pytest
import source

ROOT = Path(__file__).resolve().parents[2]
# what llama_cpp imports at its head, and what those import in turn
DEPENDENCIES = ("numpy", "diskcache", "jinja2", "markupsafe", "typing_extensions")
HEAD = """
import json, sys
def report(*values):
    print("\\nreport:" + json.dumps(values[0] if len(values) == 1 else values))
def who(name="llama_cpp"):
    __import__(name)
    return "ours" if "/draftwood/_llama_cpp/" in sys.modules[name].__file__ else "stock"
"""


@dataclass(frozen=True)
class Wheels:
    draftwood: Path
    stock: Path
    real: bool


class Interpreter:
    """A Python to run code with."""

    def __init__(self, python: Path, folder: Path):
        self.python = python
        self.root = folder

    def start(self, *args: str, path: list[Path] | None = None) -> subprocess.CompletedProcess:
        """Run it in its own folder, warnings as errors, with PYTHONPATH=`path`."""
        environ = _clean_environ()
        if path:
            environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
        command = [self.python, "-W", "error", *args]
        return subprocess.run(
            command, cwd=self.root, env=environ, capture_output=True, text=True, check=False
        )

    def run(self, code: str, *options: str, path: list[Path] | None = None) -> Any:
        """Run `code`, to which HEAD is known; return what it hands to `report`, through JSON."""
        done = self.start(*options, "-c", HEAD + textwrap.dedent(code), path=path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.rpartition("report:")[2])


class Environment(Interpreter):
    """A virtual environment without pip; dependencies are links into the one that runs the tests."""

    def __init__(self, root: Path):
        super().__init__(root / "bin" / "python", root)
        venv.EnvBuilder(symlinks=True).create(root)
        self.site = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(root)}))
        self.dependencies = root / "dependencies"
        self.dependencies.mkdir()
        for name in DEPENDENCIES:
            spec = importlib.util.find_spec(name)
            origin = Path(spec.origin)
            target = origin.parent if spec.submodule_search_locations else origin
            (self.dependencies / target.name).symlink_to(target)
        (self.site / "zz_dependencies.pth").write_text(f"{self.dependencies}\n")

    def pip(self, *args: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *args]
        done = subprocess.run(command, capture_output=True, text=True, env=_clean_environ(), check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path, *options: str | Path) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-deps", *options, wheel)

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--quiet", "--yes", name)


@pytest.fixture
def running(tmp_path) -> Interpreter:
    """The Python that runs the tests."""
    return Interpreter(Path(sys.executable), tmp_path)


@pytest.fixture
def environment(tmp_path) -> Environment:
    """An empty environment for one test."""
    return Environment(tmp_path / "env")


@pytest.fixture(scope="session")
def fresh(wheels, tmp_path_factory) -> Environment:
    """Draftwood alone. Shared: tests that change it take `environment` instead."""
    environment = Environment(tmp_path_factory.mktemp("fresh") / "env")
    environment.install(wheels.draftwood)
    return environment


@pytest.fixture(scope="session")
def both(wheels, tmp_path_factory) -> Environment:
    """Draftwood beside llama-cpp-python. Shared: tests that change it take `environment` instead."""
    environment = Environment(tmp_path_factory.mktemp("both") / "env")
    environment.install(wheels.stock)
    environment.install(wheels.draftwood)
    return environment


REAL = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first of them builds llama-cpp-python


@pytest.fixture(scope="session", params=["fake", pytest.param("real", marks=REAL)])
def wheels(request) -> Wheels:
    return request.getfixturevalue(f"{request.param}_wheels")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return source.ensure_source(ROOT).path


@pytest.fixture(scope="session")
def fake_wheels(sdist, tmp_path_factory) -> Wheels:
    folder = tmp_path_factory.mktemp("fake")
    pyfiles.stage(sdist, folder / "_llama_cpp")
    stock = _python_files(sdist / "llama_cpp", "llama_cpp")
    private = _python_files(folder / "_llama_cpp", "draftwood/_llama_cpp")
    ours = private | _python_files(ROOT / "python" / "draftwood", "draftwood")
    ours["draftwood.pth"] = (ROOT / "cmake" / "draftwood.pth").read_bytes()
    library = _empty_library(folder, _text(stock | ours))
    stock |= {f"llama_cpp/lib/{name}": library for name in _library_names(_text(stock))}
    ours |= {f"draftwood/_llama_cpp/lib/{name}": library for name in _library_names(_text(private))}
    version = source.load_lock(ROOT).version
    return Wheels(
        _wheel(folder, "draftwood", "0", ours), _wheel(folder, "llama_cpp_python", version, stock), real=False
    )


@pytest.fixture(scope="session")
def real_wheels(our_wheel) -> Wheels:
    """Our wheel, and llama-cpp-python, built once into build/stock."""
    return Wheels(our_wheel, _stock_wheel(ROOT / "build" / "stock"), real=True)


@pytest.fixture(scope="session")
def fresh_real(our_wheel, tmp_path_factory) -> Environment:
    """The real wheel alone. Shared."""
    environment = Environment(tmp_path_factory.mktemp("fresh_real") / "env")
    environment.install(our_wheel)
    return environment


@pytest.fixture(scope="session")
def our_wheel() -> Path:
    """The wheel of `make wheel` or DRAFTWOOD_WHEEL."""
    named = os.environ.get("DRAFTWOOD_WHEEL")
    found = [Path(named)] if named else sorted((ROOT / "build" / "dist").glob("draftwood-*.whl"))
    assert found, f"found no wheel in DRAFTWOOD_WHEEL or {ROOT / 'build' / 'dist'}; run `make wheel` first"
    return found[-1]


def _stock_wheel(folder: Path) -> Path:
    """Build llama-cpp-python's sdist as it is, in folders that stay: a build cut off goes on there."""
    lock = source.load_lock(ROOT)
    pattern = f"{lock.name}-{lock.version}-*.whl"
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-xzf", source.find_sdist(ROOT, lock), "-C", folder], check=True)
        # no cache: a wheel without libraries, made with LLAMA_BUILD=OFF, would be taken from there in silence
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
        command += ["--no-build-isolation", "--config-settings", f"build-dir={folder / 'build'}"]
        environ = _clean_environ()
        environ.pop("CMAKE_ARGS", None)
        with (folder / "build.log").open("w") as log:
            command.append(folder / lock.top)
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environ)
    return next(folder.glob(pattern))


def _wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


def _python_files(folder: Path, package: str) -> dict[str, bytes]:
    return {f"{package}/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*.py")}


def _text(files: dict[str, bytes]) -> str:
    return b"\n".join(files.values()).decode()


def _library_names(python: str) -> list[str]:
    """File names of the libraries that the loader code asks for."""
    names = re.findall(r'_lib(?:mtmd)?_base_name = "(\S+)"|load_shared_library\("(\S+)",', python)
    return sorted(f"lib{one or other}.so" for one, other in names)


def _empty_library(folder: Path, python: str) -> bytes:
    """Compile a library that has every C function the code binds. Each returns 0, but for the API version."""
    names = set(re.findall(r'"(_Z\w+|(?:llama|ggml|gguf|mtmd|dw)_\w+)"', python))
    names |= set(re.findall(r"\b_lib\.(\w+)", python))
    header = (ROOT / "src" / "include" / "draftwood.h").read_text()
    value = {"dw_api_version": re.search(r"define DW_API_VERSION (\d+)", header)[1]}
    code, library = folder / "empty.c", folder / "empty.so"
    code.write_text("".join(f"long {name}(void) {{ return {value.get(name, 0)}; }}\n" for name in names))
    subprocess.run([os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-o", library, code], check=True)
    return library.read_bytes()


def _clean_environ() -> dict[str, str]:
    """The environment without what would put other packages or libraries in an environment's way."""
    drop = ("PYTHON", "LLAMA_CPP_LIB", "MTMD_CPP_LIB", "VIRTUAL_ENV", "__PYVENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}
