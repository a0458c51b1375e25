"""Which llama-server bench/gpu/measure.py puts beside a case; servers and our process are stand-ins."""

from __future__ import annotations

from typing import ClassVar

from synth_gguf import PRESETS, write

from bench.gpu import cases, files, measure, stock
from bench.gpu.work import Clock, Work


class _Server:
    """A llama-server that only knows its flags and who asked it for plain decode, after it was ready."""

    served: ClassVar[dict[str, list[str]]] = {}
    made: ClassVar[list[str]] = []

    def __init__(self, flags, log):
        self.flags, self.log, self.is_ready = list(flags), log, False
        self.made.append(log.stem)

    def ready(self, limit):
        self.is_ready = True

    def serve(self, case, prompts, n_tokens, seed, limit):
        assert self.is_ready
        if self.log.stem in ("stock-plain", "stock-own"):
            self.served[case.name] = self.flags
        return [{"seen": [(0.0, 1), (1.0, 2)], "predicted_n": 2} for _ in prompts]

    def close(self):
        pass


class _Worker:
    def __init__(self, model, drafter, log):
        pass

    def call(self, limit, method, *given):
        return {"n_vocab": 8} if method == "open" else {}

    def close(self):
        pass


def test_plain_decode_is_beside_a_server_with_the_flags_of_the_case(tmp_path, monkeypatch):
    """Whatever cases are measured with it: one with experts in host memory, or another cache."""
    model = tmp_path / "model.gguf"
    write(PRESETS["moe-plain"], model)
    monkeypatch.setattr(measure, "Server", _Server)
    monkeypatch.setattr(measure, "Worker", _Worker)
    monkeypatch.setattr(_Server, "served", {})
    monkeypatch.setattr(_Server, "made", [])
    known = cases.read(settings=["repeats=1", "restarts=1"])
    chosen = [known[name] for name in ("expert50", "length4", "plain", "plain-32k", "plain-q8", "served4")]
    paths = files.Files(model, None)
    assert measure.run(Work(tmp_path / "work", None), Clock(9.0), chosen, paths, lambda said: None)
    assert list(_Server.served) == ["length4", "plain", "plain-32k", "expert50", "plain-q8", "served4"]
    assert _Server.made.count("stock-plain") == 1
    assert _Server.made.count("stock-own") == 3
    for case in chosen:
        flags = _Server.served[case.name]
        n_ctx = int(flags[flags.index("--ctx-size") + 1]) // max(1, case.clients)
        assert n_ctx >= case.n_ctx
        assert flags == stock.common_flags(case, model, n_ctx)
