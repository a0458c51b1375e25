"""The whole surface of llama-cpp-python is there under our name: modules, names, constants, signatures."""

import pytest

pytestmark = pytest.mark.compat

# names of a fork, for programs that were written for it (speculative.py)
ADDED = {"llama_speculative": ("SpecConfig", "SpeculativeType")}
# every module but those that need the server's packages, and one for a library that is no longer built
SURFACE = """
    import draftwood  # so that `package` may be either
    import importlib, inspect, pkgutil, re
    package = importlib.import_module(PACKAGE)

    def describe(value):
        if isinstance(value, (bool, int, float, str)):
            return value
        try:
            text = str(inspect.signature(value))
        except (TypeError, ValueError):
            return type(value).__name__
        return re.sub(" at 0x[0-9a-f]+", "", text).replace("draftwood._llama_cpp", "llama_cpp")

    def surface(module):
        return {name: describe(getattr(module, name)) for name in dir(module) if name[0] != "_"}

    def arguments(method):  # what a call depends on: annotations may differ
        if not callable(method):
            return type(method).__name__
        return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(method).parameters.values()]

    modules = {"": package}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name not in ("server", "llava_cpp"):
            modules[info.name] = importlib.import_module(package.__name__ + "." + info.name)
    Llama = draftwood.Llama if PACKAGE == "draftwood._llama_cpp" else package.Llama
    methods = {name: arguments(getattr(Llama, name)) for name in dir(Llama) if name[0] != "_"}
    report({name: surface(module) for name, module in modules.items()}, methods, arguments(Llama))
"""


@pytest.fixture(scope="module")
def surfaces(both):
    return [both.run(f"\n    PACKAGE = {name!r}{SURFACE}") for name in ("llama_cpp", "draftwood._llama_cpp")]


def test_modules_names_and_signatures_are_equal(surfaces):
    (stock, _, _), (ours, _, _) = surfaces
    assert ours.keys() == stock.keys() >= {"", "llama", "llama_cpp", "mtmd_cpp", "llama_chat_format"}
    assert sum(map(len, stock.values())) > 1000
    for module, names in stock.items():
        added = {name: ours[module].pop(name) for name in ADDED.get(module, ())}
        assert not added.keys() & names.keys()
        assert ours[module] == names, module


def test_llama_has_every_method_with_its_arguments(surfaces):
    (_, stock, _), (_, ours, _) = surfaces
    assert len(stock) > 30
    for name, arguments in stock.items():
        kept = ours.get(name)
        if isinstance(kept, list):  # ours may take more, behind
            kept = [argument for argument in kept if argument in arguments]
        assert kept == arguments, name


def test_making_a_llama_takes_every_argument_with_its_default(surfaces):
    (_, _, stock), (_, _, ours) = surfaces
    assert len(stock) > 40
    assert [argument for argument in ours if argument in stock] == stock
