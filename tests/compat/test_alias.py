"""The name `llama_cpp`: ours where llama-cpp-python is absent, its own where installed, in every order."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.compat


def test_an_unchanged_program_gets_ours(fresh):
    result = fresh.run("""
        import importlib.util
        assert importlib.util.find_spec("llama_cpp") is not None
        import llama_cpp
        import llama_cpp.llama_chat_format as by_name
        from llama_cpp import Llama, LlamaGrammar, llama_types
        from llama_cpp.llama import Llama as LlamaBySubmodule
        from llama_cpp.llama_types import CreateCompletionResponse
        import draftwood
        import draftwood._llama_cpp.llama_types
        report(
            Llama is draftwood.Llama is LlamaBySubmodule is llama_cpp.Llama,
            llama_cpp is draftwood._llama_cpp,
            llama_cpp.llama_cpp is draftwood._llama_cpp.llama_cpp,
            by_name is draftwood._llama_cpp.llama_chat_format,
            llama_types is draftwood._llama_cpp.llama_types,
            LlamaGrammar is draftwood._llama_cpp.LlamaGrammar,
            isinstance(object.__new__(draftwood.Llama), llama_cpp.Llama),
            llama_cpp.__version__ == draftwood._llama_cpp.__version__,
        )
    """)
    assert result == [True] * 8


def test_no_module_is_loaded_twice_and_none_loses_its_spec(fresh):
    result = fresh.run("""
        import llama_cpp, llama_cpp.llama, llama_cpp.mtmd_cpp, llama_cpp.llama_cpp_ext, llama_cpp.server
        import draftwood._llama_cpp.mtmd_cpp, draftwood._llama_cpp.server
        modules = {name: module for name, module in sys.modules.items() if "llama_cpp" in name}
        files = {module.__file__ for module in modules.values()}
        odd = [name for name, module in modules.items() if not (
            module.__spec__.name == module.__name__ and module.__name__.startswith("draftwood._llama_cpp")
        )]
        report(len({id(module) for module in modules.values()}), len(files), odd)
    """)
    assert result[0] == result[1] > 10
    assert result[2] == []


def test_what_is_not_there_is_not_found(fresh):
    result = fresh.run("""
        import llama_cpp
        try:
            import llama_cpp.nothing
        except ModuleNotFoundError as error:
            report(error.name, str(error))
    """)
    assert result == ["llama_cpp.nothing", "No module named 'llama_cpp.nothing'"]


def test_classes_pickle_by_either_name(fresh):
    assert (
        fresh.run("""
        import pickle
        import draftwood
        stock_name = b"cllama_cpp.llama\\nLlamaState\\n."  # as llama-cpp-python's disk cache writes it
        import llama_cpp
        report(
            pickle.loads(pickle.dumps(llama_cpp.Llama)) is draftwood.Llama,
            pickle.loads(pickle.dumps(llama_cpp.LlamaState)) is llama_cpp.LlamaState,
            pickle.loads(stock_name) is llama_cpp.LlamaState,
        )
    """)
        == [True] * 3
    )


def test_reloading_keeps_our_class(fresh):
    assert fresh.run("""
        import importlib
        import llama_cpp, draftwood
        report(importlib.reload(llama_cpp).Llama is draftwood.Llama)
    """)


def test_importing_draftwood_does_not_touch_the_name(fresh):
    assert fresh.run("""
        finders = list(sys.meta_path)
        from draftwood import Llama
        touched = [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]
        report(touched, finders == sys.meta_path)
    """) == [[], True]


def test_the_server_module_runs_under_the_name(fresh):
    # the server's own packages are absent here: it gets as far as our look for them
    done = fresh.start("-m", "llama_cpp.server", "--help")
    assert "llama_cpp.server needs packages that are not installed: fastapi, uvicorn, " in done.stderr
    assert 'hint: pip install ".[server]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("first", ["stock", "draftwood"])
def test_stock_installed_before_or_after_stays_in_force(environment, wheels, first):
    second = "draftwood" if first == "stock" else "stock"
    environment.install(getattr(wheels, first))
    environment.install(getattr(wheels, second))
    for imports in ("llama_cpp, draftwood", "draftwood, llama_cpp"):
        result = environment.run(f"""
            import {imports}
            import llama_cpp.llama_chat_format
            report(who(), who("llama_cpp.llama_chat_format"), who("draftwood._llama_cpp"),
                   draftwood.Llama is llama_cpp.Llama, issubclass(draftwood.Llama, llama_cpp.Llama))
        """)
        assert result == ["stock", "stock", "ours", False, False], imports


def test_stock_further_along_the_path_stays_in_force_and_draftwood_unimported(environment, wheels):
    # what a virtual environment over system packages, or a user install over them, makes of sys.path
    below = environment.root / "below"
    environment.install(wheels.draftwood)
    environment.install(wheels.stock, "--target", below)
    (environment.site / "zzz_below.pth").write_text(f"{below}\n")
    assert environment.run("""
        import llama_cpp, llama_cpp.llama_types
        report(who(), who("llama_cpp.llama_types"), "draftwood" in sys.modules,
               llama_cpp.__spec__.name, llama_cpp.llama_types is sys.modules["llama_cpp.llama_types"])
    """) == ["stock", "stock", False, "llama_cpp", True]


def test_a_bare_folder_of_that_name_is_no_stock(fresh):
    folder = fresh.root / "llama_cpp"  # the working directory is first on sys.path
    folder.mkdir()
    assert fresh.run("report(sys.path[0], who())") == ["", "ours"]
    folder.rmdir()


def test_a_broken_stock_install_is_not_papered_over(environment, wheels):
    # llama-cpp-python without its library: what LLAMA_BUILD=OFF leaves in pip's wheel cache
    environment.install(wheels.stock)
    environment.install(wheels.draftwood)
    (environment.site / "llama_cpp" / "lib" / "libllama.so").unlink()
    assert environment.run("""
        try:
            import llama_cpp
        except FileNotFoundError as error:
            import draftwood
            leftovers = [name for name in sys.modules if name.startswith("llama_cpp.")]
            draftwood.install()
            report(str(error), leftovers != [], who(), who("llama_cpp._ctypes_extensions"))
    """) == ["Shared library with base name 'llama' not found", True, "ours", "ours"]


@pytest.mark.parametrize("first", ["stock", "draftwood"])
def test_uninstalling_either_leaves_the_other_working(environment, wheels, first):
    environment.install(wheels.stock)
    environment.install(wheels.draftwood)
    name = {"stock": "llama_cpp_python", "draftwood": "draftwood"}
    environment.uninstall(name[first])
    if first == "stock":
        assert environment.run("report(who(), who('draftwood._llama_cpp'))") == ["ours", "ours"]
        environment.uninstall("draftwood")
    else:
        assert environment.run("report(who(), 'draftwood' in sys.modules)") == ["stock", False]
        environment.uninstall("llama_cpp_python")
    left = {path.name for path in environment.site.iterdir()}
    assert left == {"zz_dependencies.pth"}


def test_target_folder_has_no_alias_but_draftwood_and_install(environment, wheels, tmp_path):
    # a .pth file counts in site-packages only
    target = tmp_path / "target"
    environment.install(wheels.draftwood, "--target", target)
    _draftwood_without_pth(environment, path=[target])


def test_python_without_site_has_no_alias_but_draftwood_and_install(fresh):
    _draftwood_without_pth(fresh, "-S", path=[fresh.site, fresh.dependencies])


def _draftwood_without_pth(environment, *options: str, path: list[Path]) -> None:
    assert environment.run(
        """
        try:
            import llama_cpp
        except ModuleNotFoundError as error:
            import draftwood
            draftwood.install()
            import llama_cpp
            report(error.name, llama_cpp.Llama is draftwood.Llama, who("llama_cpp.llama_types"))
        """,
        *options,
        path=path,
    ) == ["llama_cpp", True, "ours"]


def test_isolated_python_has_the_alias(fresh):
    assert fresh.run("report(who())", "-I") == "ours"
