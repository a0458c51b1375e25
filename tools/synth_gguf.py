"""Write random GGUF files for tests and timings: what the pin's qwen35, qwen35moe, dflash graphs take.

    python tools/synth_gguf.py moe-mtp build/moe-mtp.gguf
    python tools/synth_gguf.py 35b-a3b build/a3b.gguf --layers 4 --set types=Q8_0
    python tools/synth_gguf.py 35b-a3b build/a3b.gguf --dflash build/a3b-dflash.gguf
    python tools/synth_gguf.py --list

With routing=text (35b-a3b) experts are chosen as on real text, with routing=loose less locally;
tools/routing.py measures it.
From Python: `from synth_gguf import PRESETS, SynthSpec, measure, write`. The work is done in tools/synth/.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace
from typing import TypeVar

from synth.dflash import DrafterSpec
from synth.spec import PRESETS, SynthError, SynthSpec
from synth.writer import Summary, measure, write

__all__ = ["PRESETS", "DrafterSpec", "Summary", "SynthError", "SynthSpec", "measure", "write"]

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


Spec = TypeVar("Spec", SynthSpec, DrafterSpec)
DRAFTER = "dflash."  # before a field of the drafter


def changed(spec: Spec, settings: list[str]) -> Spec:
    """Return `spec` with "field=value" settings applied; SynthError for an unknown field or a wrong value."""
    kinds = {field.name: type(field.default) for field in fields(spec) if field.name != "target"}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if name not in kinds or not sign:
            expected = f"FIELD=VALUE with FIELD one of {', '.join(kinds)}"
            raise SynthError(f"--set {setting!r}", expected, "--list shows the fields of every preset")
        try:
            value = BOOLEANS[text.lower()] if kinds[name] is bool else kinds[name](text)
        except (KeyError, ValueError):
            found, hint = f"--set {setting!r}", f"--set {name}={getattr(spec, name)}"
            raise SynthError(found, f"a value of type {kinds[name].__name__}", hint) from None
        spec = replace(spec, **{name: value})
    return spec


def listing() -> str:
    """Return one line a preset: file size, parameters, and the fields that differ from the defaults."""
    plain = SynthSpec()
    lines = [f"{'defaults':16} " + " ".join(f"{f.name}={getattr(plain, f.name)}" for f in fields(plain))]
    for name, spec in PRESETS.items():
        size = measure(spec)
        own = (f.name for f in fields(spec) if getattr(spec, f.name) != getattr(plain, f.name))
        changes = " ".join(f"{field}={getattr(spec, field)}" for field in own)
        lines.append(f"{name:16} {size.bytes / 1e6:9.1f} MB {size.params / 1e6:9.1f} M  {changes}")
    return "\n".join(lines)


def put(spec: SynthSpec | DrafterSpec, path: str) -> None:
    """Write one file and say what it came to."""
    began = time.perf_counter()
    done = write(spec, path)
    took = time.perf_counter() - began
    size = f"{done.bytes / 1e6:.1f} MB, {done.params / 1e6:.1f} M parameters, {done.tensors} tensors"
    print(f"{path}: {size}, {took:.2f} s, {done.bytes / 1e9 / took:.2f} GB/s", flush=True)


def arguments_of(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("preset", nargs="?", help="a name that --list shows")
    parser.add_argument("out", nargs="?", help="file to write")
    parser.add_argument("--dflash", metavar="FILE", help="write a DFlash drafter for this model too")
    parser.add_argument("--list", action="store_true", help="show the presets with their sizes and fields")
    parser.add_argument("--layers", type=int, help="trunk blocks, in place of the preset's")
    parser.add_argument("--seed", type=int, help="of every weight")
    parser.add_argument("--vocab", metavar="GGUF", help="copy the tokenizer from this file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="change one field; dflash.FIELD is the drafter's",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = arguments_of(arguments)
    if args.list:
        print(listing())
        return 0
    short = {"layers": args.layers, "seed": args.seed, "vocab_file": args.vocab}
    try:
        if args.preset not in PRESETS:
            raise SynthError(f"preset is {args.preset!r}", f"one of {', '.join(PRESETS)}", "--list")
        if not (args.out or args.dflash):
            raise SynthError("no file to write is named", "one", f"{args.preset} {args.preset}.gguf")
        spec = replace(PRESETS[args.preset], **{k: v for k, v in short.items() if v is not None})
        spec = changed(spec, [each for each in args.set if not each.startswith(DRAFTER)])
        own = [each.removeprefix(DRAFTER) for each in args.set if each.startswith(DRAFTER)]
        if own and not args.dflash:
            raise SynthError(f"--set {DRAFTER}{own[0]} without a drafter", "one", "--dflash drafter.gguf")
        drafter = changed(DrafterSpec(spec, seed=spec.seed), own)
        if args.out:
            put(spec, args.out)
        if args.dflash:
            put(drafter, args.dflash)
    except (SynthError, OSError) as error:
        print(f"synth_gguf: {error}", file=sys.stderr)
        return 2
    if args.out and spec.routing != "even":
        print(f"how it routes: python tools/routing.py {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
