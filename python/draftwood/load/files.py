"""The files that a `Llama` is made from. Validates paths up front and raises a readable error.

Must not know: contexts, drafting. Test: tests/model/test_bad_input.py.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from typing import Any

import jinja2

from draftwood.engine.engine import ModelInfo, probe_model
from draftwood.errors import ModelFileError, OptionError, UnsupportedError, translated
from draftwood.load import log


def checked_model(path: str) -> ModelInfo:
    """Return what a model file's header says. Errors: ModelFileError; UnsupportedError for a drafter."""
    info = _probed(path, "Model")
    if info.architecture == "dflash":
        raise UnsupportedError(
            f"{path} is a DFlash drafter (architecture 'dflash'), which continues no text by itself",
            hint="Llama(model, drafter=path), with the model that it was made for",
        )
    return info


def need_drafter_file(path: str) -> None:
    """Raise ModelFileError unless the path is a GGUF file, OptionError for an empty one.

    Whether it is a drafter is checked when it is loaded.
    """
    if not path:
        raise OptionError(
            "drafter is ''; expected the path of a DFlash drafter's GGUF",
            hint="drafter=path, or leave it out",
        )
    _probed(path, "Drafter")


def checked_lora(path: Any) -> str | None:
    """Return lora_path= as a str; None and "" stand for none. Errors: ModelFileError for no GGUF."""
    if not path:
        return None
    path = os.fsdecode(path)
    _probed(path, "LoRA")
    return str(path)


def drafter_path(path: Any) -> str | None:
    """Return drafter= as a str. Errors: OptionError for what is no path."""
    try:
        return None if path is None else os.fsdecode(path)
    except TypeError:
        raise OptionError(
            f"drafter is of type {type(path).__name__}; expected the path of a DFlash drafter's GGUF",
            hint="drafter=path",
        ) from None


def no_lora(path: str) -> ModelFileError:
    """Return the error for a GGUF that llama.cpp could not take as an adapter of the model."""
    return ModelFileError(
        f"{path} is no LoRA adapter of this model; expected a GGUF of one that was trained on it: "
        f"{log.cause() or 'llama.cpp refused it'}",
        hint="llama.cpp's convert_lora_to_gguf.py makes such files",
    )


def readable_model_errors(init: Any) -> Any:
    """Return LlamaModel.__init__ with an error that says why it loaded no model. Errors: ModelFileError."""

    @functools.wraps(init)
    def wrapped(self: Any, *, path_model: str, params: Any, verbose: bool = True) -> None:
        log.forget()
        try:
            init(self, path_model=path_model, params=params, verbose=verbose)
        except ValueError as error:
            raise ModelFileError(
                f"{error}; expected one that llama.cpp can load: {log.cause() or 'it did not say why'}",
                hint="download the file again; where memory is short, a smaller n_gpu_layers or file",
            ) from error

    return wrapped


def unparsable_template_as_error(path: str) -> contextlib.AbstractContextManager[None]:
    """Raise ModelFileError for a chat template that does not parse."""
    return translated(
        jinja2.TemplateError,
        lambda error: ModelFileError(
            f"{path} has a chat template that does not parse: {error}; expected one of Jinja2",
            hint="download the file again, or convert it again with the template mended",
        ),
    )


def _beside(path: str) -> str:
    """Return which models lie in the folder that a missing file was looked for in, the likest names first."""
    folder, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(OSError):
        if found := [each for each in os.listdir(folder) if each.endswith(".gguf")]:
            return f"in {folder}: {', '.join(difflib.get_close_matches(name, found, 3, 0.0))}"
    return f"check the path; it was looked for in {folder}"


def _probed(path: str, kind: str) -> ModelInfo:
    if not os.path.exists(path):
        raise ModelFileError(f"{kind} path does not exist: {path}", hint=_beside(path))
    if os.path.isdir(path):
        raise ModelFileError(f"{path} is a directory; expected a GGUF file", hint="check the path")
    return probe_model(path)
