"""Generators left behind and Ctrl-C anywhere: the next request is exact."""

from __future__ import annotations

import gc
import itertools
import signal
import sys

import draftwood.generate.generation as generation_module
import pytest

from tests.model.texts import P, fresh, text


def test_stale_generator_closed_late(on, off):
    expected = text(off, 30), fresh(off, 30, [9, 8, 7])
    for k in range(1, 7):
        old = on.generate(P, temp=0.0)
        assert list(itertools.islice(old, k)) == expected[0][:k]
        new = on.generate([9, 8, 7], temp=0.0)
        got = list(itertools.islice(new, k))
        old.close()
        got += itertools.islice(new, 30 - k)
        new.close()
        assert got == expected[1]


def test_stale_generator_dropped_within_a_processor(on, off):
    """The garbage collector may end a generator at any time, also inside a callback of the next one."""
    expected = fresh(off, 30, [9, 8, 7])
    for k in range(1, 12):
        stale = [on.generate(P, temp=0.0)]
        next(stale[0])
        calls = []

        def drop(ids, scores, stale=stale, calls=calls, k=k):
            calls.append(len(ids))
            if len(calls) == k:
                stale.clear()
                gc.collect()
            return scores

        assert text(on, 30, [9, 8, 7], logits_processor=[drop]) == expected
        assert not stale
        assert calls == list(range(3, 33))


def test_resuming_a_stale_generator_is_no_crash(python, gguf):
    """Its sampler is still alive; it says that another has taken over, and the next request is exact."""
    done = python(
        """
        import gc, sys, itertools
        from draftwood import Llama
        settings = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        llm = Llama(sys.argv[1], speculation=sys.argv[2], seed=7, **settings)
        expected = list(itertools.islice(llm.generate([1, 2, 3], temp=0.7), 20))
        for k in (1, 2, 3, 5):
            old = llm.generate([1, 2, 3], temp=0.7)
            for _ in range(k): next(old)
            new = llm.generate([4, 5, 6], temp=0.7, top_k=5)
            for _ in range(k): next(new)
            gc.collect()
            junk = [bytearray(4096) for _ in range(200)]
            try:
                for _ in range(10): next(old)
            except Exception as error:
                print(type(error).__name__)
            try:
                for _ in range(3): next(new)
            except Exception as error:
                print(type(error).__name__)
            del old, new
            llm.reset()
            got = list(itertools.islice(llm.generate([1, 2, 3], temp=0.7), 20))
            assert got == expected, (k, got, expected)
        print("fine")
        """,
        gguf("planted-moe"),
        "mtp",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("fine\n")


def test_signal_in_mid_generation(either, off):
    """Ctrl-C as the kernel sends it, while a processor runs and between two tokens."""
    expected = text(off, 30)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for at in range(1, 8):
        calls = []

        def processor(ids, scores, calls=calls, at=at):
            calls.append(1)
            if len(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return scores

        either.reset()
        with pytest.raises(KeyboardInterrupt):
            text(either, 20, logits_processor=[processor])
        assert text(either, 30) == expected

        def consume(at=at):
            for i, _ in enumerate(either.generate(P, temp=0.0), start=1):
                if i == at:
                    signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            consume()
        assert text(either, 30) == expected


class Interrupter:
    """Raises KeyboardInterrupt at the n-th time that a line of draftwood/generation.py is about to run."""

    def __init__(self, at: tuple[int, int] | None = None) -> None:
        self.at = at
        self.hits: dict[int, int] = {}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename != generation_module.__file__:
            return None
        if event == "line":
            self.hits[frame.f_lineno] = self.hits.get(frame.f_lineno, 0) + 1
            if self.at == (frame.f_lineno, self.hits[frame.f_lineno]):
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def test_interrupt_at_every_line(on, off):
    """Python delivers Ctrl-C between any two bytecodes: each line of generation.py, run 1 and 3."""
    tokens = text(off, 12)
    held, second = [*P, *tokens[:3]], [*P, *tokens[:3], 17]

    def requests():
        text(on, 4)
        text(on, 5, held)
        text(on, 5, second, logits_processor=[lambda ids, scores: scores])
        on.generate(second, temp=0.0).send(None)

    expected = fresh(off, 6, second)
    with Interrupter() as seen:
        requests()
    assert len(seen.hits) > 60
    for line, times in seen.hits.items():
        for nth in {1, min(times, 3)}:
            on.reset()
            with pytest.raises(KeyboardInterrupt), Interrupter((line, nth)):
                requests()
            assert text(on, 6, second) == expected, f"line {line}, run {nth}"
            assert text(on, 4) == tokens[:4], f"line {line}, run {nth}"


ENGINE_CALLS = ["row", "next", "propose", "verify", "trim", "commit", "eval", "rewind", "reset"]


@pytest.mark.parametrize("name", ENGINE_CALLS)
def test_interrupt_after_every_engine_call(on, off, name, monkeypatch):
    """The same inside engine.py: after the library has done its work, before generation.py hears of it."""
    held = [*P, *text(off, 3)]
    second = [*held, 17]
    expected, after = fresh(off, 12, second), fresh(off, 12)
    real = getattr(type(on._engine), name)
    for at in range(1, 9):
        calls = []

        def interrupted(self, *args, calls=calls, at=at, **kwargs):
            calls.append(1)
            result = real(self, *args, **kwargs)
            if len(calls) == at:
                raise KeyboardInterrupt
            return result

        on.reset()
        monkeypatch.setattr(type(on._engine), name, interrupted)
        try:
            text(on, 4)
            text(on, 5, held)
            text(on, 5, second)
        except KeyboardInterrupt:
            assert len(calls) == at
        finally:
            monkeypatch.setattr(type(on._engine), name, real)
        assert calls
        assert text(on, 12, second) == expected, f"call {at} of {name}"
        assert text(on, 12) == after, f"call {at} of {name}"
