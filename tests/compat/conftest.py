"""Wheels and throw-away environments for the coexistence tests.

Tests of draftwood beside llama-cpp-python run twice: with fakes, fast, in `make test`, and with the built
wheels in `make test-full`. A fake holds the real Python files over a library of empty functions; the fake
draftwood has the real alias and `install()`, and a `Llama` that is the copied class under our name.
Must not know: what any test expects. pip and venv do the installing, no code of ours stands in for them.
"""

import base64
import hashlib
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


class Environment:
    """A virtual environment without pip; dependencies are links into the one that runs the tests."""

    def __init__(self, root: Path):
        self.root = root
        venv.EnvBuilder(symlinks=True).create(root)
        self.python = root / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(root)}))
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
        subprocess.run(command, check=True, capture_output=True, env=_clean_environ())

    def install(self, wheel: Path, *options: str | Path) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-deps", *options, wheel)

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--quiet", "--yes", name)

    def start(self, *args: str, path: list[Path] | None = None) -> subprocess.CompletedProcess:
        """Run this environment's Python, warnings as errors, in its own folder, with PYTHONPATH=`path`."""
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
    python = {str(path.relative_to(sdist)): path.read_bytes() for path in (sdist / "llama_cpp").rglob("*.py")}
    stub = _stub_library(folder, b"\n".join(python.values()).decode())
    stock = python | {"llama_cpp/lib/libllama.so": stub, "llama_cpp/lib/libmtmd.so": stub}

    private = folder / "_llama_cpp"
    pyfiles.stage(sdist, private)
    ours = {
        f"draftwood/_llama_cpp/{path.relative_to(private)}": path.read_bytes()
        for path in private.rglob("*.py")
    }
    package = ROOT / "python" / "draftwood"
    for path in [package / "_install.py", *(package / "_alias").rglob("*.py")]:
        ours[str(path.relative_to(package.parent))] = path.read_bytes()
    ours |= {f"draftwood/_llama_cpp/lib/{name}": stub for name in ("libllama.so", "libmtmd.so")}
    ours["draftwood.pth"] = (ROOT / "cmake" / "draftwood.pth").read_bytes()
    ours["draftwood/__init__.py"] = b"from ._install import install\nfrom .llama import Llama\n"
    ours["draftwood/llama.py"] = b"from ._llama_cpp.llama import Llama as Base\nclass Llama(Base): pass\n"
    version = source.load_lock(ROOT).version
    return Wheels(
        _wheel(folder, "draftwood", "0", ours), _wheel(folder, "llama_cpp_python", version, stock), real=False
    )


@pytest.fixture(scope="session")
def real_wheels() -> Wheels:
    """The wheel of `make wheel` or DRAFTWOOD_WHEEL, and llama-cpp-python, built once into build/stock."""
    named = os.environ.get("DRAFTWOOD_WHEEL")
    found = [Path(named)] if named else sorted((ROOT / "build" / "dist").glob("draftwood-*.whl"))
    assert found, f"found no wheel in DRAFTWOOD_WHEEL or {ROOT / 'build' / 'dist'}; run `make wheel` first"
    return Wheels(found[-1], _stock_wheel(ROOT / "build" / "stock"), real=True)


def _stock_wheel(folder: Path) -> Path:
    lock = source.load_lock(ROOT)
    pattern = f"{lock.name}-{lock.version}-*.whl"
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        # no cache: a wheel without libraries, made with LLAMA_BUILD=OFF, would be taken from there in silence
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
        environ = _clean_environ()
        environ.pop("CMAKE_ARGS", None)
        with (folder / "build.log").open("w") as log:
            command.append(source.find_sdist(ROOT, lock))
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environ)
    return next(folder.glob(pattern))


def _wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


def _stub_library(folder: Path, python: str) -> bytes:
    """Compile a library that has every C function the Python files bind; each returns 0."""
    names = set(re.findall(r'"(_Z\w+|(?:llama|ggml|gguf|mtmd)_\w+)"', python)) | set(
        re.findall(r"_lib\.(\w+)", python)
    )
    code, library = folder / "stub.c", folder / "stub.so"
    code.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    subprocess.run([os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-o", library, code], check=True)
    return library.read_bytes()


def _clean_environ() -> dict[str, str]:
    """The environment without what would put other packages or libraries in an environment's way."""
    drop = ("PYTHON", "LLAMA_CPP_LIB", "MTMD_CPP_LIB", "VIRTUAL_ENV", "__PYVENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}
