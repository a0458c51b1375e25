"""With draftwood switched off a build computes what the pinned llama.cpp computes, bit for bit.

The same script runs twice, each in its own process: on our library through `Llama(exact=False,
speculation="off")`, and on a pristine one through llama-cpp-python's own class. The pristine library is built
once, from the unpatched pin with the very CMake options of our build, into build/pristine/;
DRAFTWOOD_PRISTINE_LIB names the folder of one that is there already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import draftwood._llama_cpp as private
import numpy as np
import pytest
import source

ROOT = Path(__file__).resolve().parents[2]

# argv: "ours" or "pristine", the folder that holds the package _llama_cpp, the result, models
SCRIPT = """
import sys, types
side, package, result, *models = sys.argv[1:]
if side == "ours":
    from draftwood import Llama
    own = {"exact": False, "speculation": "off"}
else:
    # the same Python files, without anything of ours that would look for the engine in the library
    stub = types.ModuleType("draftwood")
    stub.__path__ = [package]
    sys.modules["draftwood"] = stub
    from draftwood._llama_cpp.llama import Llama
    own = {}
import itertools
import numpy as np

from draftwood._llama_cpp import llama_cpp as native
assert hasattr(native._lib, "dw_api_version") == (side == "ours"), "the wrong library is loaded"

SETTINGS = [{}, {"flash_attn": True}, {"n_ubatch": 32}]
if side == "ours":
    assert Llama(models[0], verbose=False, **own)._engine is None
found = {}
for m, model in enumerate(models):
    for s, settings in enumerate(SETTINGS):
        llm = Llama(model, n_ctx=512, n_threads=2, n_threads_batch=2, seed=7, logits_all=True, verbose=False,
                    **own, **settings)
        for rows in (1, 2, 7, 64, 65, 200):
            prompt = [(7 * i * i + 3 * i + rows) % 380 for i in range(rows)]
            tokens = list(itertools.islice(llm.generate(prompt, temp=0.0), 12))
            name = f"model {m}, {settings}, {rows} rows"
            found[name + ": tokens"] = np.array(tokens)
            found[name + ": logits"] = llm.scores[: llm.n_tokens].copy()
        found[name + ": sampled"] = np.array(list(itertools.islice(llm.generate(prompt[:9], temp=0.9), 40)))
        llm.close()
np.savez(result, **found)
"""


def cache_of_our_build() -> Path:
    """The CMakeCache.txt of the build whose library this process has loaded."""
    for cache in sorted((ROOT / "build").glob("py3-*/CMakeCache.txt")):
        return cache
    pytest.skip(
        "no CMakeCache.txt under build/py3-*: this draftwood was built elsewhere, its options are unknown"
    )


def options_of(cache: Path) -> list[str]:
    """-D options that make CMake compile a llama.cpp of its own as it compiled ours."""
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    wanted = re.compile(
        r"(GGML|LLAMA)_\w+|CMAKE_BUILD_TYPE|CMAKE_(C|CXX|CUDA)_(COMPILER|FLAGS\w*|ARCHITECTURES)"
    )
    # folders of our build, which the other one finds for itself
    own = {name for name, value in entries.items() if str(cache.parent) in value or name.endswith("_DIR")}
    given = {name: value for name, value in entries.items() if wanted.fullmatch(name) and name not in own}
    if "ccache" in entries.get("DRAFTWOOD_CCACHE", ""):
        given |= {
            f"CMAKE_{lang}_COMPILER_LAUNCHER": entries["DRAFTWOOD_CCACHE"] for lang in ("C", "CXX", "CUDA")
        }
    given |= {"BUILD_SHARED_LIBS": "ON", "CMAKE_POSITION_INDEPENDENT_CODE": "ON"}
    return [f"-D{name}={value}" for name, value in given.items()]


@pytest.fixture(scope="session")
def pristine() -> Path:
    """The folder of a pristine libllama, built if need be."""
    if "DRAFTWOOD_PRISTINE_LIB" in os.environ:
        return Path(os.environ["DRAFTWOOD_PRISTINE_LIB"]).resolve()
    options = options_of(cache_of_our_build())
    tree = source.ensure_source(ROOT, pristine=True)
    cmake = shutil.which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if cmake is None:
        pytest.skip("no cmake: the pristine library cannot be built; set DRAFTWOOD_PRISTINE_LIB")
    build = ROOT / "build" / "pristine"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=str(Path(cmake).parent)) else []
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(cmake).parent), os.environ["PATH"]])}
    for command in (
        [cmake, "-S", tree.path / "vendor" / "llama.cpp", "-B", build, *generator, *options],
        [cmake, "--build", build, "--target", "llama", "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return build / "bin"


def results(side: str, library: Path | None, tmp_path: Path, models: list[str]) -> dict[str, np.ndarray]:
    """Run SCRIPT on one library."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "DRAFTWOOD_"))
    }
    if library is not None:
        folder = tmp_path / "lib"  # the loader looks for our file names
        folder.mkdir()
        (folder / "libdraftwood-llama.so").symlink_to(library / "libllama.so")
        environ |= {"DRAFTWOOD_LIB_PATH": str(folder), "LD_LIBRARY_PATH": str(library)}
    package = str(Path(private.__path__[0]).parent)
    result = tmp_path / f"{side}.npz"
    command = [sys.executable, "-c", SCRIPT, side, package, str(result), *models]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(result) as found:
        return dict(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_off_is_pristine(pristine, gguf, llama_arch, tmp_path):
    models = [
        gguf("moe-mtp"),
        gguf("dense-mtp"),
        gguf("q8"),
        gguf("q4k"),
        gguf("mix"),
        gguf("real-heads"),
        gguf("odd"),
        llama_arch,
    ]
    ours = results("ours", None, tmp_path, models)
    theirs = results("pristine", pristine, tmp_path, models)
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(models) * 3 * 13
    different = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} differ: {different[:8]}"
