"""What `run` and `tree` are given alike: a prompt, a model, how it drafts. Must not know: what is shown."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import reduce
from typing import IO, TYPE_CHECKING, Any

import click

from draftwood.cli import shared
from draftwood.cli.failure import library_needed
from draftwood.errors import DraftwoodError
from draftwood.options import DEFAULT_DRAFT_P_MIN, MAX_DRAFT_VOCAB, MIN_DRAFT_VOCAB, is_one_of_several

if TYPE_CHECKING:
    from draftwood.cli.progress import Interrupt
    from draftwood.cli.session import Session


def _one(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> str | None:
    if words and is_one_of_several(words[0]):  # a shell made them of NAME*.gguf
        raise click.UsageError(f"found the file {words[0]} as a prompt\n\nhint: {shared.FIRST_ALONE}")
    if len(words) > 1:
        hint = f"put the prompt in quotes: '{' '.join(words)}'"
        raise click.UsageError(f"found {len(words)} prompts; expected one\n\nhint: {hint}")
    return words[0] if words else None


_PROMPT = (
    click.argument("model"),
    click.argument("prompt", nargs=-1, metavar="[PROMPT]", callback=_one),
    click.option("-f", "--file", type=click.File("rb"), help="Read the prompt from this file."),
)  # fmt: skip
_MODEL: tuple[shared.Option, ...] = (
    click.option("--seed", type=click.IntRange(0, 2**32 - 2),
                 help="Seed of the sampler. Default: a new one; --json shows it."),
    click.option("--n-ctx", type=click.IntRange(min=0), default=shared.N_CTX, show_default=True,
                 help="Context size in tokens; 0: the model's training context."),
    click.option("--threads", type=shared.THREADS,
                 help="CPU threads of single tokens. Default: half of the usable cores."),
    click.option("--threads-batch", type=shared.THREADS,
                 help="CPU threads of prompts and verifies. Default: --threads, or all usable cores."),
    *(shared.n_card_layers, shared.vram, shared.expert_vram, shared.expert_heat),
    *(shared.expert_guess, shared.expert_readahead),
    *(shared.rpc, shared.drafter, shared.draft_tokens, shared.tree_budget()),
    click.option("--draft-p-min", type=click.FloatRange(0, 1), default=DEFAULT_DRAFT_P_MIN, show_default=True,
                 help="End a draft when its path is less probable than this."),
    click.option("--draft-vocab", type=click.IntRange(MIN_DRAFT_VOCAB, MAX_DRAFT_VOCAB),
                 help="Choose drafts among so many tokens. Default: an eighth of all, a quarter on a card."),
    click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log."),
)  # fmt: skip
_SETTINGS = (
    *("n_ctx", "n_gpu_layers", "rpc_servers", "drafter", "draft_tokens", "tree_budget", "draft_p_min"),
    *("draft_vocab", "vram", "expert_vram", "expert_heat"),
    *("expert_guess", "expert_readahead", "verbose"),
)


def prompt_options(*, chat: bool | None, default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add MODEL, PROMPT and what becomes of it to a command; `chat`: the default, None for the model's."""
    words = f"Send PROMPT through the model's chat template, or continue it as it stands. Default: {default}."
    form = click.option("--chat/--raw", "chat", default=chat, help=words)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        return reduce(lambda made, add: add(made), reversed([*_PROMPT, form]), command)

    return add


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what `load_session` reads to a command."""
    return reduce(lambda made, add: add(made), reversed(_MODEL), command)


def prompt_text(prompt: str | None, file: IO[bytes] | None) -> str:
    """Return the prompt from the argument, the file or stdin; a last newline of the latter two is dropped.

    Errors: click.UsageError for none, two, or what is no text.
    """
    if prompt is not None and file is not None:
        raise click.UsageError("found both PROMPT and --file; expected one of them")
    if prompt is not None and prompt != "-":
        return need_text(_in_utf8(prompt))
    stream = file or sys.stdin.buffer
    if file is None and prompt is None and stream.isatty():
        raise click.UsageError("found no prompt; expected PROMPT, --file, or text on stdin")
    try:
        text = stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is no UTF-8 text: {error}") from None
    return need_text(text.removesuffix("\n").removesuffix("\r"))


def _in_utf8(prompt: str) -> str:
    """Return an argument. Python has halves of surrogate pairs for bytes that it cannot read."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(prompt)[:40]
        hint = "give the prompt as UTF-8; iconv -f LATIN1 -t UTF-8 converts a file for --file"
        raise click.UsageError(f"found a prompt that is no UTF-8 text: {shown!r}\n\nhint: {hint}") from None
    return prompt


def need_text(text: str) -> str:
    """Return a prompt. Errors: click.UsageError for an empty one."""
    if not text:
        context = click.get_current_context(silent=True)
        command = " ".join(context.command_path.split()[1:]) if context else "run"
        hint = f'draftwood {command} MODEL "Once upon a time"'
        raise click.UsageError(f"found an empty prompt; expected text\n\nhint: {hint}")
    return text


def load_session(path: str, interrupt: Interrupt, options: dict[str, Any], **settings: Any) -> Session:
    """Load a model by the options of `model_options` and more settings of `Llama`.

    Where no seed was given `options` gets one. Errors: DraftwoodError of the kind that `Llama` raises;
    click.ClickException for llama-cpp-python's own.
    """
    with library_needed():
        from draftwood.cli.session import Session
        from draftwood.load import cpu
        from draftwood.load.card_layers import card_layers

    settings.update({name: options[name] for name in _SETTINGS})
    cpu.check()  # before the library looks for cards
    if settings["n_gpu_layers"] is None:
        settings["n_gpu_layers"] = card_layers(path, settings)
    threads = options["threads"]
    settings.update(n_threads=threads, n_threads_batch=options["threads_batch"] or threads)
    try:
        session = Session(path, interrupt, **settings)
    except DraftwoodError:
        raise
    except (ValueError, RuntimeError) as error:
        hint = "--verbose shows what llama.cpp says about it"
        raise click.ClickException(f"{error}\n\nhint: {hint}") from error
    if options["seed"] is None:
        options["seed"] = random.SystemRandom().randrange(1, 2**31)
    session.set_seed(options["seed"])  # the constructor takes 0 for none
    return session
