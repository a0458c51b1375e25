"""What the built wheel holds, that it runs where no compiler is, and that the sdist builds the same one."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pyfiles
import pytest
from draftwood.load.cpu import NEEDS

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
LIB = "draftwood/_llama_cpp/lib/"
OPENMP = re.compile(r"libgomp-\w+\.so[.\d]*")  # a copy under a name of its own (tools/repair_wheel.sh)


@pytest.fixture(scope="module")
def wheel(real_wheels) -> zipfile.ZipFile:
    return zipfile.ZipFile(real_wheels.draftwood)


def test_nothing_lies_outside_the_package_or_where_stock_has_a_file(wheel, real_wheels):
    # llama.cpp's own install rules would drop lib/, bin/ and include/ into site-packages, as stock does
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"draftwood", "draftwood.pth"}
    assert wheel.read("draftwood.pth").decode().splitlines() == ["draftwood/_alias"]
    assert _under(wheel, "draftwood/_alias/") == {"llama_cpp/__init__.py"}
    assert not set(wheel.namelist()) & set(zipfile.ZipFile(real_wheels.stock).namelist())


def test_it_is_one_wheel_for_all_pythons_of_a_platform(wheel):
    metadata = wheel.read(_one(wheel, r".*\.dist-info/WHEEL")).decode()
    assert re.findall(r"Tag: (py3-none-(?!any).*)", metadata)
    assert "Root-Is-Purelib: false" in metadata


def test_the_private_package_is_the_staged_one(wheel, sdist, tmp_path):
    pyfiles.stage(sdist, tmp_path)
    for path in [*tmp_path.rglob("*.py"), tmp_path / "py.typed"]:
        assert wheel.read(f"draftwood/_llama_cpp/{path.relative_to(tmp_path)}") == path.read_bytes()


def test_libraries_server_header_and_licences_are_there_once(wheel, sdist):
    libraries = {name for name in _under(wheel, LIB) if not OPENMP.fullmatch(name)}
    expected = {"llama", "mtmd", "ggml", "ggml-base", "ggml-rpc", "llama-common"}
    expected |= {f"ggml-cpu-{name}" for name in NEEDS}
    assert {f"libdraftwood-{name}.so" for name in expected} <= libraries
    assert not [name for name in libraries if re.search(r"\.so\.", name)]  # a second copy under a version
    server = wheel.getinfo("draftwood/bin/llama-server")
    assert server.external_attr >> 16 & 0o111
    assert b"<title>draftwood</title>" in wheel.read("draftwood/web/index.html")
    assert b"DW_API_VERSION" in wheel.read("draftwood/include/draftwood.h")
    assert b"dw_expert_pool_new" in wheel.read("draftwood/include/draftwood-experts.h")
    vendored = "vendor/llama.cpp/vendor"
    for name, text in [
        ("llama-cpp-python.md", "LICENSE.md"),
        ("llama.cpp.txt", "vendor/llama.cpp/LICENSE"),
        ("nlohmann-json.txt", "vendor/llama.cpp/licenses/LICENSE-jsonhpp"),
        ("cpp-httplib.txt", f"{vendored}/cpp-httplib/LICENSE"),
        ("xxhash.txt", f"{vendored}/hash/xxhash/LICENSE"),
        ("rotate-bits.md", f"{vendored}/hash/rotate-bits/LICENSE.md"),
        ("sha256.txt", f"{vendored}/hash/sha256/LICENSE"),
    ]:
        assert wheel.read(f"draftwood/licenses/{name}") == (sdist / text).read_bytes()
    for name, part in [
        ("llamafile.txt", b"Copyright 2024 Mozilla Foundation"),
        ("stb_image.txt", b"Copyright (c) 2017 Sean Barrett"),
        ("miniaudio.txt", b"David Reid"),
        ("subprocess.txt", b"released into the public domain"),
        ("sha1.txt", b"100% Public Domain"),
    ]:
        text = wheel.read(f"draftwood/licenses/{name}")
        assert part in text
        assert len(text) < 4000, "the licence, not the source"
    unwanted = re.compile(r"__pycache__|\.(gguf|cmake|pc|a)$")
    assert not [name for name in wheel.namelist() if unwanted.search(name)]


def test_the_installed_server_runs_on_our_libraries(environment, real_wheels):
    environment.install(real_wheels.draftwood)
    server = environment.site / "draftwood" / "bin" / "llama-server"
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    assert "version" in done.stdout + done.stderr
    libraries = subprocess.check_output(["ldd", server], text=True)
    found = re.findall(r"(\S*(?:llama|ggml|mtmd)\S*) => (\S+)", libraries)
    assert len(found) >= 5
    folder = (environment.site / "draftwood" / "_llama_cpp" / "lib").resolve()
    assert {Path(path).resolve().parent for _, path in found} == {folder}


def test_it_runs_in_a_clean_environment_without_a_compiler(our_wheel, tmp_path):
    venv.create(tmp_path, symlinks=True, with_pip=True)
    programs = str(tmp_path / "bin")
    tools = ("cc", "gcc", "c++", "g++", "clang", "cmake", "ninja", "make", "ld")
    environ = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "HOME"))}
    environ |= {"PATH": programs, "OMP_WAIT_POLICY": "passive"}
    python = tmp_path / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", our_wheel]
    subprocess.run(install, env=environ, check=True, capture_output=True)
    assert not [name for name in tools if shutil.which(name, path=programs)]
    model = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
    command = [python, ROOT / "tools" / "try_wheel.py", model]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["text"]
    assert report["same"]
    (openmp,) = report["mapped"]  # the wheel's own: a machine without a compiler has none
    assert OPENMP.fullmatch(Path(openmp).name)
    assert Path(openmp).resolve().is_relative_to(tmp_path.resolve())


def test_its_tag_names_the_glibc_that_it_needs(our_wheel):
    # a wheel that needs a library outside the policy, or a newer glibc, is consistent with linux_x86_64 alone
    tag = our_wheel.stem.rpartition("-")[2]
    shown = subprocess.check_output([sys.executable, "-m", "auditwheel", "show", our_wheel], text=True)
    assert f'the following platform tag: "{tag}"' in " ".join(shown.split())
    assert tag.startswith("manylinux_")


def test_the_sdist_builds_a_wheel_with_the_same_files(wheel, tmp_path):
    # in a folder of its own, so that nothing of the checkout can be used by chance
    code = "import sys; sys.path.insert(0, '_build'); import backend; backend.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("draftwood-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", tmp_path]
    subprocess.run([*pip, archive], check=True, capture_output=True)
    (built,) = tmp_path.glob("draftwood-*.whl")
    own, portable = (set(each.namelist()) for each in (zipfile.ZipFile(built), wheel))
    folder = "draftwood/_llama_cpp/lib/libdraftwood-ggml-cpu"
    assert own - portable == {f"{folder}.so"}  # compiled for this machine
    # the repair adds folders, what it took from where, and OpenMP
    repaired = {name for name in portable if name.endswith("/") or "/sboms/" in name or OPENMP.search(name)}
    assert portable - own - repaired == {f"{folder}-{name}.so" for name in NEEDS}


def _under(wheel: zipfile.ZipFile, folder: str) -> set[str]:
    names = (name for name in wheel.namelist() if name.startswith(folder) and not name.endswith("/"))
    return {name.removeprefix(folder) for name in names}


def _one(wheel: zipfile.ZipFile, pattern: str) -> str:
    (name,) = (name for name in wheel.namelist() if re.fullmatch(pattern, name))
    return name
