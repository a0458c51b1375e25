"""The stages of bench/run.py: each takes work folder, clock and plan, and says whether it is done.

What a stage has found it does not look for again. Must not know: the command line. Tests:
tests/model/test_bench_run.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import draftwood

from bench.gpu import child, files, floor, measure, profiling, stamp
from bench.gpu.cases import Case
from bench.gpu.work import Clock, Work
from bench.gpu.worker import Worker

FLOOR, MEMORY, REAL = 120.0, 240.0, 480.0  # seconds
TREE_NODES = (16, 24)  # of the trees whose memory is measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    cases: list[Case]
    real: str
    """More options of `draftwood bench`."""
    say: Callable[[str], Any]

    @property
    def models(self) -> list[str]:
        """Every model that the cases name."""
        return list(dict.fromkeys(case.model for case in self.cases))


def run(name: str, work: Work, clock: Clock, plan: Plan) -> bool:
    """Run a stage and return whether it is done. Errors: BenchError at the first failure."""
    work.state["commit"] = stamp.known(Path(draftwood.__file__).parent)
    done = STAGES[name](work, clock, plan)
    work.save()
    return done


def _models(work: Work, clock: Clock, plan: Plan) -> bool:
    found = work.state.setdefault("models", {})
    for model in plan.models:
        drafts = any(case.drafter == "dflash" for case in plan.cases if case.model == model)
        took = files.write(model, drafts, work, clock) if model in files.presets() else 0.0
        paths = files.of(model, work)
        if model not in found:
            reads = files.reads(paths.model)
            on_card = plan.cases[0].n_gpu_layers != 0
            found[model] = {
                "bytes": paths.model.stat().st_size,
                "drafter_bytes": paths.drafter.stat().st_size if paths.drafter else None,
                "reads": asdict(reads),
                **(files.routing(paths.model, on_card, work, clock) if reads.n_experts else {}),
            }
        plan.say(f"{model}: {found[model]['bytes'] / 2**30:.1f} GiB, written in {took} s")
        plan.say(f"  routing {found[model].get('routing')}")
    return True


def _floor(work: Work, clock: Clock, plan: Plan) -> bool:
    if "floor" not in work.state:
        card = floor.card()
        # a process of its own: this one must hold no memory of the card
        command = [str(files.ROOT / "bench" / "run.py"), "bandwidth"]
        done = child.run("stage floor", command, work.logs / "floor.log", clock.limit(FLOOR))
        work.state["floor"] = {"card": card, **child.answer("stage floor", done)}
    found = work.state["floor"]
    plan.say(f"{found['card']['name']}: copies {found['bytes_per_second'] / 1e9:.0f} GB/s, read and written")
    return True


def _memory(work: Work, clock: Clock, plan: Plan) -> bool:
    found = work.state.setdefault("memory", {})
    for model in plan.models:
        if model in found:
            continue
        paths = files.of(model, work)
        case = next(case for case in plan.cases if case.model == model)
        worker = Worker(paths.model, paths.drafter, work.logs / "memory.log")
        try:
            found[model] = worker.call(clock.limit(MEMORY), "memory", asdict(case), TREE_NODES)
            work.state["machine"] = worker.call(clock.limit(60), "machine")
        finally:
            worker.close()
        for nodes, sizes in found[model].items():
            plan.say(f"{model}, {nodes} nodes: {sizes}")
    return True


def _cases(work: Work, clock: Clock, plan: Plan) -> bool:
    done = [
        measure.run(
            work, clock, [case for case in plan.cases if case.model == model], files.of(model, work), plan.say
        )
        for model in plan.models
    ]
    return all(done)


def _real(work: Work, clock: Clock, plan: Plan) -> bool:
    """Drafters as they are on a trained model: `draftwood bench` on tiny-moe, all modes."""
    if "real" in work.state:
        return True
    limit = clock.limit(REAL)
    if limit < REAL / 2:
        return False
    paths, into = files.of("tiny-moe", work), work.folder / "real.json"
    command = [
        *("-m", "draftwood", "bench", str(paths.model), "--drafter", str(paths.drafter)),
        *("--prompts", str(files.TINY / "heldout"), "--n-gpu-layers", str(plan.cases[0].n_gpu_layers)),
        *("--json", str(into), *shlex.split(plan.real)),
    ]
    plan.say(child.run("stage real", command, work.logs / "real.log", limit))
    work.state["real"] = json.loads(into.read_text(encoding="utf-8"))
    return True


def _profile(work: Work, clock: Clock, plan: Plan) -> bool:
    found = work.state.setdefault("profile", {})
    for case in plan.cases:
        phase = "plain" if case.drafter == "none" else "round"
        if case.name in found:
            continue
        if clock.left < profiling.LIMIT / 2:
            return False
        table = profiling.run(
            case, phase, files.of(case.model, work), work.logs / "ncu.log", clock.limit(profiling.LIMIT)
        )
        found[case.name] = {phase: table}
        work.save()
        per_round = table["launches"] / table["rounds"], table["us"] / table["rounds"]
        plan.say(f"{case.name}, {phase}: {per_round[0]:.0f} kernels, {per_round[1]:.0f} us a round")
        for each in table["kernels"][:12]:
            plan.say(
                f"  {each['us'] / table['rounds']:9.1f} us {each['launches'] / table['rounds']:7.1f}  "
                f"{each['kernel'][:90]}"
            )
    return True


STAGES: dict[str, Callable[[Work, Clock, Plan], bool]] = {
    "models": _models,
    "floor": _floor,
    "memory": _memory,
    "cases": _cases,
    "real": _real,
    "profile": _profile,
}
