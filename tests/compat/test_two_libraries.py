"""Draftwood and llama-cpp-python generate side by side in one process, each on its own libraries."""

import re
import subprocess
from pathlib import Path

import pytest
from synth_gguf import PRESETS, write

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 24

# `sides` in the order of import: loads the model on each, then takes one token of each in turn
GENERATE = """
    import ctypes, importlib
    LLAMA_SYMBOLS = ("llama_decode", "ggml_time_us", "ggml_backend_reg_count")
    MTMD_SYMBOLS = ("mtmd_init_from_file", "llama_decode", "ggml_time_us")
    PACKAGES = {"stock": ("llama_cpp", "llama_cpp"), "ours": ("draftwood", "draftwood._llama_cpp")}

    def owner(library, symbol):
        # the file that the loader bound `symbol` to, looked up through `library` and what it depends on
        return file_at(ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)

    def cpu_backend(library):
        # the file of the CPU backend that is registered
        by_name = library.ggml_backend_reg_by_name
        by_name.restype, by_name.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        return file_at(by_name(b"CPU"))

    def file_at(address):
        with open("/proc/self/maps") as maps:
            for line in maps:
                low, high = (int(number, 16) for number in line.split()[0].split("-"))
                if low <= address < high:
                    return line.split()[-1]

    generators, bound = {}, {}
    for side in sides:
        package, private = PACKAGES[side]
        llama = importlib.import_module(package).Llama(model, n_ctx=256, n_threads=2, verbose=False)
        generators[side] = llama.generate([5, 6, 7, 8], temp=0.0)
        for library, symbols in [
            (importlib.import_module(private + ".llama_cpp")._lib, LLAMA_SYMBOLS),
            (importlib.import_module(private + ".mtmd_cpp")._libmtmd, MTMD_SYMBOLS),
        ]:
            bound.setdefault(side, []).extend(owner(library, symbol) for symbol in symbols)
        bound[side].append(cpu_backend(importlib.import_module(private + ".llama_cpp")._lib))
    text = {side: [] for side in sides}
    for _ in range(count):
        for side in sides:
            text[side].append(next(generators[side]))
    report(text, bound)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    write(PRESETS["moe-mtp"], path)
    return path


def test_each_binds_its_own_and_generates_what_it_generates_alone(environment, real_wheels, model):
    environment.install(real_wheels.stock)
    environment.install(real_wheels.draftwood)

    def generate(*sides: str):
        head = f"\n    sides, model, count = {sides!r}, {str(model)!r}, {TOKENS}"
        return environment.run(head + GENERATE)

    alone = {side: generate(side)[0][side] for side in ("stock", "ours")}
    assert len(set(alone["stock"])) > 1
    folders = {"stock": "llama_cpp/lib/", "ours": "draftwood/_llama_cpp/lib/"}
    for order in (("stock", "ours"), ("ours", "stock")):
        text, bound = generate(*order)
        assert text == alone, order
        for side, files in bound.items():
            prefix = f"{environment.site}/{folders[side]}"
            assert all(file.startswith(prefix) for file in files), (order, side, files)
            assert len(set(files)) >= 5, (order, side, files)


def test_no_library_of_ours_has_a_name_that_another_package_could_bind(environment, real_wheels):
    # the loader goes by sonames once a library is in the process; backends have none: paths name them
    environment.install(real_wheels.draftwood)
    libraries = sorted((environment.site / "draftwood" / "_llama_cpp" / "lib").glob("*.so*"))
    assert len(libraries) >= 6
    # GCC's OpenMP runtime under the name that auditwheel gave it, with a hash of what is in it
    ours = re.compile(r"libdraftwood-.*|libgomp-[0-9a-f]{8}\.so\..*")
    assert [path.name for path in libraries if not ours.fullmatch(path.name)] == []
    named = [path.name for path in libraries if _dynamic(path, "SONAME") == [path.name]]
    backends = [path.name for path in libraries if _dynamic(path, "SONAME") == []]
    assert len(named) + len(backends) == len(libraries)
    assert len(named) >= 5
    for path in libraries:
        needed = [name for name in _dynamic(path, "NEEDED") if re.search("llama|ggml|mtmd", name)]
        assert set(needed) <= set(named), path


def _dynamic(path: Path, tag: str) -> list[str]:
    text = subprocess.check_output(["readelf", "--dynamic", "--wide", path], text=True)
    return re.findall(rf"\({tag}\).*\[(.+)\]", text)
