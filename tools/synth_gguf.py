"""Write random GGUF files for tests and timings: any shape the pin's qwen35 and qwen35moe graphs take.

    python tools/synth_gguf.py moe-mtp build/moe-mtp.gguf
    python tools/synth_gguf.py 35b-a3b build/a3b.gguf --layers 4 --set types=Q8_0
    python tools/synth_gguf.py --list

From Python: `from synth_gguf import PRESETS, SynthSpec, measure, write`. The work is done in tools/synth/.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace

from synth.spec import PRESETS, SynthError, SynthSpec
from synth.writer import Summary, measure, write

__all__ = ["PRESETS", "Summary", "SynthError", "SynthSpec", "measure", "write"]

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def changed(spec: SynthSpec, settings: list[str]) -> SynthSpec:
    """Return `spec` with "field=value" settings applied; SynthError for an unknown field or a wrong value."""
    kinds = {field.name: type(field.default) for field in fields(spec)}
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


def main(arguments: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("preset", nargs="?", help="a name that --list shows")
    parser.add_argument("out", nargs="?", help="file to write")
    parser.add_argument("--list", action="store_true", help="show the presets with their sizes and fields")
    parser.add_argument("--layers", type=int, help="trunk blocks, in place of the preset's")
    parser.add_argument("--seed", type=int, help="of every weight")
    parser.add_argument("--vocab", metavar="GGUF", help="copy the tokenizer from this file")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change one field")
    args = parser.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    short = {"layers": args.layers, "seed": args.seed, "vocab_file": args.vocab}
    try:
        if args.preset not in PRESETS:
            raise SynthError(f"preset is {args.preset!r}", f"one of {', '.join(PRESETS)}", "--list")
        if not args.out:
            raise SynthError("no file to write is named", "one", f"{args.preset} {args.preset}.gguf")
        spec = replace(PRESETS[args.preset], **{k: v for k, v in short.items() if v is not None})
        began = time.perf_counter()
        done = write(changed(spec, args.set), args.out)
    except (SynthError, OSError) as error:
        print(f"synth_gguf: {error}", file=sys.stderr)
        return 2
    took = time.perf_counter() - began
    size = f"{done.bytes / 1e6:.1f} MB, {done.params / 1e6:.1f} M parameters, {done.tensors} tensors"
    print(f"{args.out}: {size}, {took:.2f} s, {done.bytes / 1e9 / took:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
