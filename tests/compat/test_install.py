"""`draftwood.install()`: ours under the name `llama_cpp` although llama-cpp-python is installed too."""

import pytest

pytestmark = pytest.mark.compat


def test_everything_imported_afterwards_is_ours(both):
    assert (
        both.run("""
        import draftwood
        module = draftwood.install()

        def validator():  # as LangChain's: imports when the user makes the object
            from llama_cpp import Llama, LlamaGrammar
            return Llama, LlamaGrammar

        import llama_cpp
        from llama_cpp.llama import Llama as by_submodule
        import llama_cpp.mtmd_cpp
        names = [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]
        llama = object.__new__(draftwood.Llama)
        report(
            module is llama_cpp is draftwood._llama_cpp,
            validator() == (draftwood.Llama, draftwood._llama_cpp.LlamaGrammar),
            isinstance(llama, llama_cpp.Llama),  # as guidance's
            by_submodule is draftwood.Llama,
            {who(name) for name in names} == {"ours"},
            "llama_cpp.mtmd_cpp" in names,
        )
    """)
        == [True] * 6
    )


def test_only_our_libraries_are_mapped(both):
    assert _mapped(both, "import draftwood; draftwood.install(); import llama_cpp.mtmd_cpp") == {"draftwood"}


def test_importing_both_maps_both(both):
    code = "import draftwood, llama_cpp, llama_cpp.mtmd_cpp, draftwood._llama_cpp.mtmd_cpp"
    assert _mapped(both, code) == {"draftwood", "llama_cpp"}


def test_a_library_folder_named_for_stock_is_not_ours(both, tmp_path):
    # users of llama-cpp-python point these at a build of their own
    environ = {"LLAMA_CPP_LIB_PATH": str(both.site / "llama_cpp" / "lib"), "MTMD_CPP_LIB": str(tmp_path)}
    assert _mapped(both, f"import os; os.environ |= {environ}; import draftwood._llama_cpp.mtmd_cpp") == {
        "draftwood"
    }


def _mapped(environment, code: str) -> set[str]:
    """The packages whose libraries a process maps after `code`."""
    paths = environment.run(f"""
        {code}
        report([line.split()[-1] for line in open("/proc/self/maps") if ".so" in line])
    """)
    site = f"{environment.site}/"
    return {path.removeprefix(site).partition("/")[0] for path in paths if path.startswith(site)}


def test_calling_again_changes_nothing(both):
    assert (
        both.run("""
        import draftwood
        first = draftwood.install()
        finders = list(sys.meta_path)
        modules = dict(sys.modules)
        report(draftwood.install() is first, finders == sys.meta_path, modules == sys.modules)
    """)
        == [True] * 3
    )


def test_calling_after_the_alias_changes_nothing(fresh):
    assert fresh.run("""
        import llama_cpp, draftwood
        report(draftwood.install() is llama_cpp)
    """)


def test_after_stock_was_imported_it_is_refused_in_words_and_stock_goes_on(both):
    message, still_stock, submodule = both.run("""
        import llama_cpp
        import draftwood
        before = llama_cpp.Llama
        try:
            draftwood.install()
        except ImportError as error:
            from llama_cpp import Llama
            import llama_cpp.mtmd_cpp
            report(str(error), Llama is before, llama_cpp.mtmd_cpp.__file__)
    """)
    assert str(both.site / "llama_cpp" / "__init__.py") in message
    assert "expected that nothing had imported it yet" in message
    assert "\n\nhint: call draftwood.install() at the start of the program" in message
    assert still_stock
    assert submodule == str(both.site / "llama_cpp" / "mtmd_cpp.py")


def test_a_child_process_starts_afresh(both):
    assert (
        both.run("""
        import subprocess
        import draftwood
        draftwood.install()
        code = "import llama_cpp; print(llama_cpp.__name__)"
        report(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    """)
        == "llama_cpp"
    )
