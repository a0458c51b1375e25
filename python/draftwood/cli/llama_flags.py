"""llama.cpp's flags at commands that have them by another name: an answer with the name.

Must not know: what options do. Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

import click

_LAYERS, _CONTEXT, _DRAFTER = "--n-gpu-layers N", "--n-ctx N", "--drafter FILE"
_MODEL, _PROMPT = "MODEL stands behind the command", "PROMPT stands behind MODEL, in quotes"
_ARGUMENTS = {_MODEL: "model", _PROMPT: "prompt"}
_OURS = {
    **dict.fromkeys(("-ngl", "--gpu-layers"), _LAYERS),
    **dict.fromkeys(("-c", "--ctx-size"), _CONTEXT),
    **dict.fromkeys(("-m", "--model"), _MODEL),
    **dict.fromkeys(("-p", "--prompt"), _PROMPT),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), _DRAFTER),
    **dict.fromkeys(("--draft", "--draft-max", "--spec-draft-n-max"), "--draft-tokens N"),
    **dict.fromkeys(("--predict", "--n-predict"), "-n N"),
    "-t": "--threads N",
    "-tb": "--threads-batch N",
    "-s": "--seed N",
}


class Command(click.Command):
    """A command that knows what llama.cpp calls its options. click reads -ngl as -n with the value gl."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, or raise click.UsageError for a flag of llama.cpp's; not while a shell completes a line."""
        own = {flag for option in self.params for flag in (*option.opts, *option.secondary_opts)}
        has = {*own, *(each.name for each in self.params)}
        for argument in args[: args.index("--")] if "--" in args else args:
            flag = argument.partition("=")[0]
            ours = "" if flag in own or ctx.resilient_parsing else _OURS.get(flag, "")
            if ours and _ARGUMENTS.get(ours, ours.split()[0]) in has:
                raise click.UsageError(f"found {flag}, which is llama.cpp's\n\nhint: {ours}", ctx)
        return super().parse_args(ctx, args)
