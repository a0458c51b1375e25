"""The CUDA module is loaded with runtime wheels that lie in another folder than draftwood."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from draftwood.engine.cuda_libraries import MODULE, Outcome

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import sys
sys.path.insert(0, {python!r})
from pathlib import Path
from draftwood.engine import cuda_libraries
found = cuda_libraries.load(Path({folder!r}))
environ = {{"LD_LIBRARY_PATH": "/before"}}
found.hand_on(environ)
print(found.error, [str(path) for path in found.folders], environ["LD_LIBRARY_PATH"], sep="\\n")
"""


def library(path: Path, needs: Path | None = None, runpath: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", path, f"-Wl,-soname,{path.name}"]
    command += ["-x", "c", "/dev/null", "-x", "none"]
    if needs:
        command += ["-Wl,--no-as-needed", needs, f"-Wl,--enable-new-dtags,-rpath,{runpath}"]
    subprocess.run(command, check=True)


def load(folder: Path, path: list[Path]) -> list[str]:
    """What a fresh process with these folders on sys.path finds."""
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    code = LOAD.format(python=str(ROOT / "python"), folder=str(folder))
    return subprocess.check_output([sys.executable, "-c", code], env=environ, text=True).splitlines()


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Path, Path]:
    """A site-packages with the module, whose RUNPATH names the runtime wheels' folder, and another one."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    runtime = tmp_path / "build" / "libcudart.so.99"  # of no CUDA that this machine may have
    library(runtime)
    library(ours / "draftwood/_llama_cpp/lib" / MODULE, runtime, "$ORIGIN/../../../nvidia/cu13/lib")
    runtime.unlink()
    return ours, other


def test_runtime_wheels_beside_draftwood_are_found_by_the_loader(sites):
    ours, other = sites
    library(ours / "nvidia/cu13/lib/libcudart.so.99")
    assert load(ours / "draftwood/_llama_cpp/lib", [ours, other]) == ["", "[]", "/before"]


@pytest.mark.parametrize("place", ["cu13", "cuda_runtime"])
def test_runtime_wheels_in_another_folder_are_loaded_from_there_and_handed_on(sites, place):
    ours, other = sites
    library(other / "nvidia" / place / "lib" / "libcudart.so.99")
    found = other / "nvidia" / place / "lib"
    assert load(ours / "draftwood/_llama_cpp/lib", [ours, other]) == ["", f"['{found}']", f"{found}:/before"]


def test_a_missing_runtime_is_named(sites):
    ours, other = sites
    error, folders, path = load(ours / "draftwood/_llama_cpp/lib", [ours, other])
    assert error.startswith("libcudart.so.99: cannot open shared object file")
    assert (folders, path) == ("[]", "/before")
    assert 'pip install "draftwood[cuda99]"' in Outcome(error).fix


def test_a_runtime_that_cannot_be_loaded_is_named(sites):
    ours, other = sites
    broken = other / "nvidia/cu13/lib/libcudart.so.99"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    error = load(ours / "draftwood/_llama_cpp/lib", [ours, other])[0]
    assert error.startswith(str(broken))


def test_a_build_without_cuda_loads_nothing(tmp_path):
    assert load(tmp_path, [tmp_path]) == ["", "[]", "/before"]
    assert Outcome().fix == ""


def test_the_extras_name_what_the_fix_installs():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for major in ("12", "13"):
        fix = Outcome(f"libcublasLt.so.{major}: cannot open shared object file").fix
        extra = re.search(r"draftwood\[(\w+)\]", fix)[1]
        assert re.search(rf"^{extra} = \[$", project, re.MULTILINE)
    assert "driver" in Outcome("libcuda.so.1: cannot open shared object file").fix
