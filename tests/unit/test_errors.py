"""Exception classes: what they derive from, and how their texts read."""

import inspect

import draftwood
import pytest
from draftwood import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c is not errors.DraftwoodError]

# what llama-cpp-python raises in the same place: existing except-clauses keep working
BUILTINS = {
    "OptionError": ValueError,
    "UnsupportedError": ValueError,
    "ModelFileError": ValueError,
    "GrammarError": ValueError,
    "DrafterMemoryError": MemoryError,
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
