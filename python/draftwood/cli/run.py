"""`draftwood run`: text from a model on stdout as it is generated, one line of figures on stderr."""

from __future__ import annotations

import codecs
import contextlib
import json
import random
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from draftwood.cli.failure import INTERRUPTED, library_needed
from draftwood.cli.progress import Interrupt
from draftwood.errors import DraftwoodError
from draftwood.options import (
    DEFAULT_DRAFT_P_MIN,
    DEFAULT_DRAFT_TOKENS,
    MAX_DRAFT_TOKENS,
    SPECULATIONS,
)

if TYPE_CHECKING:
    from draftwood.cli.session import Report, Session

# on a terminal: what a model writes must not move the cursor or set colours
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if code not in b"\n\t")


def _prompt(prompt: str | None, file: IO[bytes] | None) -> str:
    """Return the prompt from the argument, the file or stdin; a last newline of the latter two is dropped."""
    if prompt is not None and file is not None:
        raise click.UsageError("found both PROMPT and --file; expected one of them")
    if prompt is not None and prompt != "-":
        return prompt
    stream = file or sys.stdin.buffer
    if file is None and prompt is None and stream.isatty():
        raise click.UsageError("found no prompt; expected PROMPT, --file, or text on stdin")
    try:
        text = stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is no UTF-8 text: {error}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise click.UsageError("found an empty prompt; expected text")
    return text


_SAMPLING = ("temp", "top_k", "top_p", "min_p")


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.File("rb"), help="Read the prompt from this file.")
@click.option("-n", "--max-tokens", type=int, default=-1,
              help="Stop after so many tokens. Default: at the text's end.")  # fmt: skip
@click.option("--chat/--raw", "chat", default=None,
              help="Send PROMPT through the model's chat template, or continue it as it stands. "
                   "Default: --chat if the model has a template.")  # fmt: skip
@click.option("--temp", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: greedy.")
@click.option("--top-k", type=int, default=40, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1), default=0.95, show_default=True)
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.05, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 2),
              help="Default: a new one each time; --json tells it.")  # fmt: skip
@click.option("--n-ctx", type=click.IntRange(min=0), default=4096, show_default=True,
              help="Context in tokens; 0: all that the model was trained for.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1),
              help="CPU threads. Default: half of the cores, all of them for the prompt.")  # fmt: skip
@click.option("--n-gpu-layers", type=click.IntRange(min=-1), default=0, show_default=True, help="-1: all.")
@click.option("--rpc", metavar="HOST:PORT,...", help="RPC servers that take layers (--n-gpu-layers).")
@click.option("--speculation", type=click.Choice(SPECULATIONS), default="auto", show_default=True,
              help="auto: draft with --drafter, or if the model has an MTP block.")  # fmt: skip
@click.option("--drafter", type=click.Path(dir_okay=False), help="GGUF of a DFlash drafter for this model.")
@click.option("--draft-tokens", type=click.IntRange(1, MAX_DRAFT_TOKENS), default=DEFAULT_DRAFT_TOKENS,
              show_default=True, help="Longest draft of a round.")  # fmt: skip
@click.option("--draft-p-min", type=click.FloatRange(0, 1), default=DEFAULT_DRAFT_P_MIN, show_default=True,
              help="End a draft where its path's probability falls below this.")  # fmt: skip
@click.option("--exact/--no-exact", default=True, show_default=True,
              help="CPU kernels with which the text is the same with and without drafting.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--no-mark", is_flag=True, help="Do not colour tokens that came from the draft.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@click.pass_context
def command(
    ctx: click.Context, /, model: str, prompt: str | None, file: IO[bytes] | None, **options: Any
) -> None:
    """Generate text after PROMPT with the GGUF file MODEL.

    PROMPT may also come from --file or stdin. Text goes to stdout, one line of figures to stderr. On a
    terminal, tokens that came from the draft are coloured; piped text is never altered.
    """
    text = _prompt(prompt, file)
    if options["seed"] is None:
        options["seed"] = random.SystemRandom().randrange(1, 2**31)
    with Interrupt() as interrupt, contextlib.closing(_load(model, interrupt, options)) as session:
        tokens, templated = session.encode_prompt(text, options["chat"])
        with Writer(marks=not options["no_mark"], held=options["as_json"]) as writer:
            sampling = {name: options[name] for name in _SAMPLING}
            report = session.run(tokens, options["max_tokens"], writer.write, **sampling)
        if options["as_json"]:
            click.echo(json.dumps(_as_dict(report, writer.text, options["seed"], templated)))
        else:
            line = summary(report, templated=templated, marked=writer.marking)
            click.echo(click.style(line, dim=True), err=True)
    if report.finish == "interrupt":
        ctx.exit(INTERRUPTED)


def _load(path: str, interrupt: Interrupt, options: dict[str, Any]) -> Session:
    with library_needed():
        from draftwood.cli.session import Session

    drafting = ("speculation", "drafter", "draft_tokens", "draft_p_min")
    passed = ("n_ctx", "n_gpu_layers", "exact", "verbose", *drafting)
    threads = {name: options["threads"] for name in ("n_threads", "n_threads_batch") if options["threads"]}
    try:
        given = {name: options[name] for name in passed}
        session = Session(path, interrupt, **threads, **given, rpc_servers=options["rpc"])
    except DraftwoodError:
        raise
    except (ValueError, RuntimeError) as error:  # llama-cpp-python's own
        hint = "--verbose shows what llama.cpp says about it"
        raise click.ClickException(f"{error}\n\nhint: {hint}") from error
    session.set_seed(options["seed"])  # the constructor takes 0 for none
    return session


class Writer:
    """Puts generated bytes on stdout as text, in a `with` block: no character in halves, nothing added.

    Bytes that are no UTF-8 are left out, as in llama-cpp-python's completions. On a terminal, text from the
    draft is coloured (underlined under NO_COLOR) and the last line is ended. `held` keeps it all in `text`.
    """

    def __init__(self, *, marks: bool, held: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held: list[str] | None = [] if held else None
        self._terminal = sys.stdout.isatty() and not held
        self._style: Any = None
        self._at_line_start = True
        if marks and self._terminal:
            from rich.color import ColorSystem
            from rich.console import COLOR_SYSTEMS, Console
            from rich.style import Style

            console = Console()
            if console.color_system is not None:
                self._system: ColorSystem = COLOR_SYSTEMS[console.color_system]
                self._style = Style(underline=True) if console.no_color else Style(color="green")

    @property
    def marking(self) -> bool:
        """Whether text from the draft is marked."""
        return self._style is not None

    @property
    def text(self) -> str:
        """Everything that was held."""
        return "".join(self._held or [])

    def write(self, piece: bytes, from_draft: bool, *, final: bool = False) -> None:
        """Write a token's bytes; a character ends in the token that completes it, and takes its mark."""
        text = self._decoder.decode(piece, final)
        if self._held is not None:
            self._held.append(text)
            return
        if self._terminal:
            text = text.translate(_CONTROLS)
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if from_draft and self._style is not None:
            text = self._style.render(text, color_system=self._system)
        out = sys.stdout.buffer
        out.write(text.encode("utf-8"))
        out.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write(b"", False, final=True)
        if kind is None and self._terminal and not self._at_line_start:
            self.write(b"\n", False)


def _as_dict(report: Report, text: str, seed: int, templated: bool) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": report.tokens,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens_per_second,
        "prompt_tokens": report.prompt_tokens,
        "prompt_seconds": report.prompt_seconds,
        "finish": report.finish,
        "chat": templated,
        "seed": seed,
        "speculation": report.speculation,
        "speculation_reason": report.speculation_reason,
        "stats": report.stats.to_dict() if report.stats else None,
    }


_ENDS = {"stop": "", "length": "", "context": " (context full)", "interrupt": " (interrupted)"}


def summary(report: Report, *, templated: bool, marked: bool) -> str:
    """Return the line that ends a run."""
    parts = [f"{report.tokens} tokens{_ENDS[report.finish]}, {report.tokens_per_second:.1f} tok/s"]
    if report.speculation == "off":
        parts.append(f"no drafts: {report.speculation_reason}")
    elif report.stats is not None and report.stats.rounds > 0:
        rate = report.stats.accepted / max(1, report.stats.drafted)
        parts.append(f"{report.stats.tokens_per_round:.2f} tokens a round")
        parts.append(f"{rate:.0%} of {report.stats.drafted} {report.speculation} drafts accepted")
        parts[-1] += " (marked)" if marked else ""
    kind = "chat prompt" if templated else "raw prompt"
    parts.append(f"{kind} {report.prompt_tokens} tokens in {report.prompt_seconds:.2f} s")
    return " | ".join(parts)
