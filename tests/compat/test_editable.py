"""The editable install that `make dev` makes, and that the tests themselves run in."""

import importlib.metadata
import json

import pytest

pytestmark = pytest.mark.compat


@pytest.fixture
def editable(running):
    try:
        text = importlib.metadata.distribution("draftwood").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("draftwood is not installed beside pytest; `make dev` installs it")
    if not json.loads(text or "{}").get("dir_info", {}).get("editable"):
        pytest.skip("draftwood is installed beside pytest, but not editable; `make dev` does that")
    return running


def test_our_files_are_the_checkout_and_the_name_is_ours(editable):
    assert editable.run("""
        import draftwood
        from pathlib import Path
        touched = "llama_cpp" in sys.modules
        import llama_cpp, llama_cpp.llama_types
        report(touched, Path(draftwood.__file__).parent.parent.name, who("llama_cpp.llama_types"),
               llama_cpp.Llama is draftwood.Llama, llama_cpp is draftwood._llama_cpp)
    """) == [False, "python", "ours", True, True]


def test_stock_stays_in_force_and_install_replaces_it(editable, wheels, environment):
    environment.install(wheels.stock)
    stock = [environment.site]
    assert editable.run(
        """
        import llama_cpp, draftwood
        report(who(), draftwood.Llama is llama_cpp.Llama)
        """,
        path=stock,
    ) == ["stock", False]
    assert editable.run(
        """
        import draftwood
        draftwood.install()
        import llama_cpp.llama_chat_format
        report(who(), who("llama_cpp.llama_chat_format"), llama_cpp.Llama is draftwood.Llama)
        """,
        path=stock,
    ) == ["ours", "ours", True]
