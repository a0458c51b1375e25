"""What click alone lets pass: flags of llama.cpp, answered with our names, and options in place of values.

Must not know: what options do. Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

from itertools import pairwise

import click

_LAYERS, _CONTEXT, _DRAFTER = "--n-gpu-layers N", "--n-ctx N", "--drafter FILE"
_MODEL, _PROMPT = "give MODEL right after the command", "give PROMPT after MODEL, in quotes"
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
        """Parse, or raise click.UsageError for a flag of llama.cpp's, or for an option in place of a value.

        Not while a shell completes a line.
        """
        if not ctx.resilient_parsing:
            given = args[: args.index("--")] if "--" in args else args
            self._require_values(ctx, given)
            self._refuse_llama_cpps(ctx, given)
        return super().parse_args(ctx, args)

    def _own(self, ctx: click.Context) -> set[str]:
        return {flag for each in self.get_params(ctx) for flag in (*each.opts, *each.secondary_opts)}

    def _require_values(self, ctx: click.Context, args: list[str]) -> None:
        """click takes whatever follows an option for its value, a further option too."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        longest = {
            flag: max(each.opts, key=len)
            for each in options
            if not (each.is_flag or each.count)
            for flag in each.opts
        }
        known = {*self._own(ctx), *_OURS}
        for flag, after in pairwise(args):
            if flag in longest and after.partition("=")[0] in known:
                raise click.UsageError(
                    f"found {after} after {flag}; expected its value\n\n"
                    f"hint: {longest[flag]}={after}, if that is its value",
                    ctx,
                )

    def _refuse_llama_cpps(self, ctx: click.Context, args: list[str]) -> None:
        own = self._own(ctx)
        has = {*own, *(each.name for each in self.params)}
        for flag in (each.partition("=")[0] for each in args):
            ours = "" if flag in own else _OURS.get(flag, "")
            if ours and _ARGUMENTS.get(ours, ours.split()[0]) in has:
                fix = ours if ours in _ARGUMENTS else f"draftwood calls it {ours}"
                raise click.UsageError(f"found {flag}, llama.cpp's name; {fix}", ctx)
