"""Which llama-server bench/gpu/measure.py puts beside a case; servers and our process are stand-ins."""

from __future__ import annotations

from typing import ClassVar

from synth_gguf import PRESETS, write

from bench.gpu import cases, files, measure, stock
from bench.gpu.work import Clock, Work


class _Server:
    """A llama-server that only knows its flags and who asked it for plain decode."""

    served: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, flags, log):
        self.flags, self.log = list(flags), log

    def ready(self, limit):
        pass

    def serve(self, case, prompts, n_tokens, seed, limit):
        if self.log.stem in ("stock-plain", "stock-own"):
            self.served[case.name] = self.flags
        return [{"seen": []} for _ in prompts]

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
    known = cases.read(settings=["repeats=1", "restarts=1"])
    chosen = [known[name] for name in ("expert50", "length4", "plain", "plain-32k", "plain-q8")]
    paths = files.Files(model, None)
    assert measure.run(Work(tmp_path / "work", None), Clock(9.0), chosen, paths, lambda said: None)
    assert set(_Server.served) == {case.name for case in chosen}
    for case in chosen:
        flags = _Server.served[case.name]
        n_ctx = int(flags[flags.index("--ctx-size") + 1])
        assert n_ctx >= case.n_ctx
        assert flags == stock.common_flags(case, model, n_ctx)
