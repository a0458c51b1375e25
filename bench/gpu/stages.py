"""The stages of bench/run.py: each takes work folder, clock and plan, and says whether it is done.

What a stage has found it does not look for again; what was found with other options is refused.
Must not know: the command line. Tests: tests/unit/test_bench_run.py, tests/model/test_bench_run.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.engine.engine import probe_model

from bench.gpu import child, files, floor, measure, profiling
from bench.gpu.cases import Case
from bench.gpu.work import Clock, Work
from bench.gpu.worker import Worker

ORIGIN, FLOOR, MEMORY, REAL = 60.0, 120.0, 240.0, 480.0  # seconds
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
    if work.origin is None:
        work.origin = _answer("origin", work, ORIGIN)
    done = STAGES[name](work, clock, plan)
    work.save()
    return done


def _answer(command: str, work: Work, limit: float) -> dict[str, Any]:
    """Return what a hidden command of bench/run.py prints. This process must hold no memory of the card."""
    name = f"bench/run.py {command}"
    script = str(files.ROOT / "bench" / "run.py")
    return child.answer(name, child.run(name, [script, command], work.logs / f"{command}.log", limit))


def _models(work: Work, clock: Clock, plan: Plan) -> bool:
    for model in plan.models:
        drafts = any(case.drafter == "dflash" for case in plan.cases if case.model == model)
        took = files.write(model, drafts, work, clock) if model in files.presets() else 0.0
        paths = files.of(model, work)
        asked = {"on_card": plan.cases[0].n_gpu_layers != 0}
        found = work.kept(asked, "models", model)
        if found is None:
            reads = files.reads(paths.model)
            routing = files.routing(paths.model, asked["on_card"], work, clock) if reads.n_experts else {}
            found = work.keep(asked, {"reads": asdict(reads), **routing}, "models", model)
        found["bytes"] = probe_model(str(paths.model)).file_bytes
        of_drafter = probe_model(str(paths.drafter)).file_bytes if paths.drafter else None  # may come later
        found["drafter_bytes"] = of_drafter
        plan.say(f"{model}: {found['bytes'] / 2**30:.1f} GiB, written in {took} s")
        plan.say(f"  routing {found.get('routing')}")
    return True


def _floor(work: Work, clock: Clock, plan: Plan) -> bool:
    found = work.kept({}, "floor")
    if found is None:
        copied = {"card": floor.card(), **_answer("bandwidth", work, clock.limit(FLOOR))}
        found = work.keep({}, copied, "floor")
    plan.say(f"{found['card']['name']}: copies {found['bytes_per_second'] / 1e9:.0f} GB/s, read and written")
    return True


def _memory(work: Work, clock: Clock, plan: Plan) -> bool:
    for model in plan.models:
        case = next(case for case in plan.cases if case.model == model)
        asked = {"n_gpu_layers": case.n_gpu_layers, "threads": case.threads}
        if work.kept(asked, "memory", model):
            continue
        paths = files.of(model, work)
        worker = Worker(paths.model, paths.drafter, work.logs / "memory.log")
        try:
            trees = worker.call(clock.limit(MEMORY), "memory", asdict(case), TREE_NODES)
        finally:
            worker.close()
        work.keep(asked, {"trees": trees}, "memory", model)
        for nodes, sizes in trees.items():
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
    asked = {"n_gpu_layers": plan.cases[0].n_gpu_layers, "real": shlex.split(plan.real)}
    if work.kept(asked, "real"):
        return True
    limit = clock.limit(REAL)
    if limit < REAL / 2:
        return False
    paths, into = files.of("tiny-moe", work), work.folder / "real.json"
    command = [
        *("-m", "draftwood", "bench", str(paths.model), "--drafter", str(paths.drafter)),
        *("--prompts", str(files.TINY / "heldout"), "--n-gpu-layers", str(asked["n_gpu_layers"])),
        *("--json", str(into), *asked["real"]),
    ]
    plan.say(child.run("stage real", command, work.logs / "real.log", limit))
    work.keep(asked, {"document": json.loads(into.read_text(encoding="utf-8"))}, "real")
    return True


def _profile(work: Work, clock: Clock, plan: Plan) -> bool:
    for case in plan.cases:
        phase = "plain" if case.drafter == "none" else "round"
        if work.kept(case.asked, "profile", case.name):
            continue
        if clock.left < profiling.LIMIT / 2:
            return False
        table = profiling.run(
            case, phase, files.of(case.model, work), work.logs / "ncu.log", clock.limit(profiling.LIMIT)
        )
        work.keep(case.asked, {"phase": phase, **table}, "profile", case.name)
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
