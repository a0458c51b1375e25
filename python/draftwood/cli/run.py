"""`draftwood run`: text from a model on stdout as it is generated, one line of figures on stderr."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import stat
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from draftwood.cli import llama_flags
from draftwood.cli.failure import INTERRUPTED
from draftwood.cli.inputs import load_session, model_options, prompt_options, prompt_text
from draftwood.cli.progress import Interrupt
from draftwood.cli.terminal import on_terminal, reader
from draftwood.options import SPECULATIONS

if TYPE_CHECKING:
    from draftwood.cli.session import Report
    from draftwood.stats import SpeculationStats

# on a terminal: what a model writes must not move the cursor or set colours
_CONTROLS = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if code not in b"\n\t")


SAMPLING = ("temp", "top_k", "top_p", "min_p")
_MODEL = ("speculation", "exact")


@click.command("run", cls=llama_flags.Command)
@prompt_options(chat=None, default="--chat if the model has a template")
@click.option("-n", "--max-tokens", type=int, default=-1,
              help="Most tokens to generate. Default, and for 0 or less: no limit.")  # fmt: skip
@click.option("--temp", type=click.FloatRange(min=0), default=0.8, show_default=True,
              help="Sampling temperature; 0: greedy.")  # fmt: skip
@click.option("--top-k", type=int, default=40, show_default=True,
              help="Sample from the K most probable tokens; 0 or less: from all.")  # fmt: skip
@click.option("--top-p", type=click.FloatRange(0, 1), default=0.95, show_default=True,
              help="Sample from the fewest tokens of this total probability.")  # fmt: skip
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.05, show_default=True,
              help="Drop tokens below this share of the best one's probability.")  # fmt: skip
@click.option("--speculation", type=click.Choice(SPECULATIONS), default="auto", show_default=True,
              help="auto: draft with --drafter or the MTP block, as long as it pays. "
                   "tree: the same, always in trees. ngram: drafts from the text. off: none.")  # fmt: skip
@model_options
@click.option("--exact/--no-exact", default=True, show_default=True,
              help="Run CPU kernels that give the same text with and without drafting.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--no-mark", is_flag=True, help="Do not mark accepted drafts.")
@click.pass_context
def command(
    ctx: click.Context, /, model: str, prompt: str | None, file: IO[bytes] | None, **options: Any
) -> None:
    """Generate text after PROMPT with the GGUF file MODEL.

    PROMPT may also come from --file or stdin. On a terminal without a prompt this is a chat; /help shows its
    commands. Text goes to stdout, one line of figures to stderr. On a terminal, accepted drafts are coloured.
    Piped text is never altered.
    """
    settings = {name: options[name] for name in _MODEL}
    if prompt is None and file is None and options["chat"] is not False and on_terminal():
        _chat(model, options, settings)
        return
    text = prompt_text(prompt, file)
    with (
        Interrupt() as interrupt,
        contextlib.closing(load_session(model, interrupt, options, **settings)) as session,
    ):
        tokens, templated = session.encode_prompt(text, options["chat"])
        with Writer(marks=not options["no_mark"], held=options["as_json"]) as writer:
            sampling = {name: options[name] for name in SAMPLING}
            report = session.run(tokens, options["max_tokens"], writer.write, **sampling)
        if options["as_json"]:
            click.echo(json.dumps(_as_dict(report, writer.text, options["seed"], templated)))
        else:
            if not writer.at_line_start and outputs_meet():
                click.echo(err=True)
            line = summary(report, templated=templated, marked=writer.marking)
            click.echo(click.style(line, dim=True), err=True)
    if report.finish == "interrupt":
        ctx.exit(INTERRUPTED)


def _chat(model: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    if options["as_json"]:
        raise click.UsageError("found --json in a chat; expected it with PROMPT, --file, or text on stdin")
    from draftwood.cli.chat import COMMANDS, converse

    def show(report: Report, *, marked: bool) -> None:
        click.echo(click.style(summary(report, templated=True, marked=marked), dim=True), err=True)

    with (
        Interrupt() as interrupt,
        contextlib.closing(load_session(model, interrupt, options, **settings)) as session,
    ):
        click.echo(click.style("Enter sends, Ctrl-C ends a reply, Ctrl-D leaves; /help", dim=True), err=True)
        converse(session, options, reader(COMMANDS), show)


def outputs_meet() -> bool:
    """Tell whether text and figures are seen together: in one file, or a pipe's reader shows them."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except OSError:  # not files at all
        return False
    return os.path.samestat(out, err) or (stat.S_ISFIFO(out.st_mode) and sys.stderr.isatty())


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
        self.at_line_start = True
        """Whether what was written ends a line, or is nothing."""
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
        self.at_line_start = text.endswith("\n")
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
        if kind is None and self._terminal and not self.at_line_start:
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
        "chains_because": report.chains_because,
        "stats": report.stats.to_dict() if report.stats else None,
        "experts": report.experts.to_dict() if report.experts else None,
    }


def _trees(stats: SpeculationStats, chains_because: str) -> list[str]:
    """Say how many rounds verified trees and in how many rows, or why none did."""
    if chains_because:
        return [f"chains only: {chains_because}"]
    if stats.tree_rounds == 0:
        return []
    rows = (stats.rounds + stats.drafted + stats.padding) / stats.rounds
    return [f"{stats.tree_rounds} of {stats.rounds} rounds in trees, {rows:.1f} rows a round"]


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
        parts += _trees(report.stats, report.chains_because)
    if report.experts is not None:
        share = report.experts.slots / max(1, report.experts.experts)
        parts.append(f"{share:.0%} of the experts in slots, {report.experts.hit_rate:.0%} hits")
    kind = "chat prompt" if templated else "raw prompt"
    parts.append(f"{kind} {report.prompt_tokens} tokens in {report.prompt_seconds:.2f} s")
    return " | ".join(parts)
