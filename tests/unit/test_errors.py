"""Exception classes: what they derive from, and how their texts read."""

import ast
import inspect
from pathlib import Path

import draftwood
import pytest
from draftwood import errors
from draftwood.engine import _capi
from draftwood.engine.status import check

PACKAGE = Path(draftwood.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_llama_cpp" not in path.parts)
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c is not errors.DraftwoodError]

# what llama-cpp-python raises in the same place: existing except-clauses keep working
BUILTINS = {
    "OptionError": ValueError,
    "UnsupportedError": ValueError,
    "ModelFileError": ValueError,
    "GrammarError": ValueError,
    "DrafterMemoryError": MemoryError,
    "ExpertMemoryError": MemoryError,
    "ServerError": ConnectionError,
    "StateError": RuntimeError,
    "CacheError": OSError,
    "ContextFullError": RuntimeError,
    "DecodeError": RuntimeError,
    "ClosedError": RuntimeError,
    "NativeError": RuntimeError,
}


def test_every_class_has_a_builtin_beside_the_base():
    assert {c.__name__: c.__mro__[2] for c in CLASSES} == BUILTINS
    assert all(c.__mro__[1] is errors.DraftwoodError for c in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_text(cls):
    plain = cls("found 1; expected 2")
    assert str(plain) == plain.message == "found 1; expected 2"
    assert plain.hint is None
    hinted = cls("found 1; expected 2", hint="take 2")
    assert str(hinted) == "found 1; expected 2\n\nhint: take 2"
    assert (hinted.message, hinted.hint) == ("found 1; expected 2", "take 2")
    assert str(cls("found 1; expected 2", hint="")) == "found 1; expected 2"
    with pytest.raises(BUILTINS[cls.__name__], match="expected 2"):
        raise hinted


@pytest.mark.parametrize("cls", CLASSES)
def test_docstrings(cls):
    assert (cls.__doc__ or "").endswith(".")


def test_public_names():
    """What user code can meet is importable from the package; NativeError stays inside."""
    public = {name for name in draftwood.__all__ if name.endswith("Error")}
    assert public == {*BUILTINS, "DraftwoodError"} - {"NativeError"}
    for name in public:
        assert getattr(draftwood, name) is getattr(errors, name)


def made_without_a_hint(text):
    """Return the lines on which an error of ours is made without one."""
    names = {c.__name__ for c in CLASSES}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]
    return [call.lineno for call in ours if "hint" not in {keyword.arg for keyword in call.keywords}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_error_has_a_hint(path):
    assert made_without_a_hint(path.read_text()) == []


def test_a_missing_hint_is_found():
    assert made_without_a_hint("raise OptionError('x', hint='y')\n\nraise StateError('x') from None") == [3]


def test_every_status_of_the_library_has_a_hint():
    codes = {name: value for name, value in vars(_capi).items() if name.startswith("ERR_")}
    assert len(codes) > 5
    for name, value in codes.items():
        with pytest.raises(errors.DraftwoodError) as caught:
            check(value)
        assert caught.value.hint, name
    with pytest.raises(errors.OptionError) as caught:
        check(_capi.ERR_ARGUMENT, hint="this one")
    assert caught.value.hint == "this one"
