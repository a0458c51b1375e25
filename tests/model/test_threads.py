"""Several threads on one Llama, as LangChain's batch() has them: calls and streams wait for each other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
from draftwood import Llama
from draftwood._llama_cpp.llama import LogitsProcessorList
from draftwood.errors import ClosedError, UnsupportedError
from draftwood.generate import turns

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
PROMPTS = ["def f(", "The lighthouse", "import os", "1 2 3"] * 2
SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}

# A crash would take pytest with it.
SCRIPT = """
import sys
from draftwood.generate import turns
from tests.model.test_threads import {what}
turns.PATIENCE = 600.0  # whoever a busy machine keeps from reading goes on with its stream
{what}({speculation!r})
"""


@pytest.mark.parametrize("speculation", ["mtp", "tree", "off"])
@pytest.mark.parametrize("what", ["whole_calls", "streams"])
def test_threads(what, speculation):
    script = SCRIPT.format(what=what, speculation=speculation)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def whole_calls(speculation: str) -> None:
    """Each has the text that it has alone; chats, embeddings and saved states come in between."""
    with closing(Llama(str(TINY), speculation=speculation, **SETTINGS)) as llm:

        def text(prompt: str) -> str:
            return llm(prompt, max_tokens=24, temperature=0.0)["choices"][0]["text"]

        def chat(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            answer = llm.create_chat_completion(messages, max_tokens=16, temperature=0.0)
            return answer["choices"][0]["message"]["content"]

        def saved(_: str) -> int:
            return llm.save_state().llama_state_size

        expected = [text(prompt) for prompt in PROMPTS], [chat(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(4) as pool:
            calls = [[pool.submit(call, prompt) for prompt in PROMPTS] for call in (text, chat, saved)]
        assert [each.result() for each in calls[0]] == expected[0]
        assert [each.result() for each in calls[1]] == expected[1]
        assert all(each.result() > 0 for each in calls[2])


def streams(speculation: str) -> None:
    """Each goes on until it ends, and others wait: all have the text that they have alone."""
    with closing(Llama(str(TINY), speculation=speculation, **SETTINGS)) as llm:
        prompts = [llm.tokenize(prompt.encode()) for prompt in PROMPTS[:4]]
        expected = [list(islice(llm.generate(prompt, temp=0.0), 100)) for prompt in prompts]
        texts = [llm(prompt, max_tokens=40, temperature=0.0)["choices"][0]["text"] for prompt in PROMPTS]

        def stream(i: int) -> list[int]:
            return list(islice(llm.generate(prompts[i], temp=0.0), 100))

        def chunks(prompt: str) -> str:
            found = llm(prompt, max_tokens=40, temperature=0.0, stream=True)
            return "".join(chunk["choices"][0]["text"] for chunk in found)

        def whole(prompt: str) -> str:
            return llm(prompt, max_tokens=40, temperature=0.0)["choices"][0]["text"]

        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(stream, i) for i in range(4)]
            answers = [pool.submit(call, prompt) for call in (chunks, whole) for prompt in PROMPTS]
        assert [each.result() for each in calls] == expected
        assert [each.result() for each in answers] == [*texts, *texts]


AT_ONCE = 60.0  # seconds, on a machine however busy

# whoever waited for it would hang
forever = pytest.mark.usefixtures("endless_patience")


@pytest.fixture
def endless_patience(monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE", 10 * AT_ONCE)


@pytest.fixture
def llm():
    with closing(Llama(str(TINY), speculation="mtp", **SETTINGS)) as made:
        yield made


def test_a_stream_that_nobody_reads_gives_way(llm, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE", 0.3)
    alone = llm("x", max_tokens=4, temperature=0.0)["choices"][0]["text"]
    stream = llm("def f(", max_tokens=50, temperature=0.0, stream=True)
    assert next(stream)
    read_at = llm._turns._stream._at
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llm, "x", max_tokens=4, temperature=0.0).result()
    assert answer["choices"][0]["text"] == alone
    assert time.monotonic() - read_at >= 0.3
    with pytest.raises(UnsupportedError, match=r"a later generate\(\) has taken the context"):
        list(stream)


@forever
@pytest.mark.parametrize("ends", ["close", "del", "read"])
def test_who_waits_goes_on_as_soon_as_the_stream_ends(llm, ends):
    stream = llm("def f(", max_tokens=3, temperature=0.0, stream=True)
    assert next(stream)
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        answer = pool.submit(llm, "x", max_tokens=4)
        time.sleep(0.2)
        assert not answer.done()
        if ends == "close":
            stream.close()
        elif ends == "read":
            assert list(stream)
        else:
            del stream
        assert answer.result()
    assert time.monotonic() - begin < AT_ONCE


@forever
def test_streams_that_any_thread_of_a_pool_reads(llm, monkeypatch):
    """As web frameworks do: whoever is free takes the next part, and begins other streams."""
    monkeypatch.setattr(turns, "GRACE", AT_ONCE)  # a loaded machine may keep a stream's other readers away
    alone = [llm(prompt, max_tokens=16, temperature=0.0)["choices"][0]["text"] for prompt in PROMPTS[:6]]

    async def read(prompt: str) -> str:
        loop, text = asyncio.get_running_loop(), ""
        stream = llm(prompt, max_tokens=16, temperature=0.0, stream=True)
        while chunk := await loop.run_in_executor(pool, next, stream, None):
            text += chunk["choices"][0]["text"]
            await asyncio.sleep(0.001)
        return text

    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*map(read, PROMPTS[:6])))

    with ThreadPoolExecutor(16) as pool:
        assert asyncio.run(all_of_them()) == alone


@forever
def test_who_waits_for_a_llama_that_is_closed_hears_of_it(llm):
    stream = llm("def f(", max_tokens=50, stream=True)
    assert next(stream)
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        answer = pool.submit(llm, "x", max_tokens=4)
        time.sleep(0.2)
        llm.close()
        with pytest.raises(ClosedError):
            answer.result()
    assert time.monotonic() - begin < AT_ONCE


def test_a_stream_without_our_engine_is_cut_off_in_words():
    with closing(Llama(str(TINY), speculation="off", exact=False, **SETTINGS)) as llm:
        prompt = llm.tokenize(b"def f(")
        stream = llm.generate(prompt, temp=0.0)
        assert next(stream) > 0
        expected = list(islice(llm.generate(prompt, temp=0.0), 8))
        with pytest.raises(UnsupportedError, match=r"a later generate\(\) has taken the context"):
            next(stream)
        assert list(islice(llm.generate(prompt, temp=0.0), 8)) == expected


def test_a_turn_that_cannot_end_a_dropped_stream_is_over(monkeypatch):
    """Its error is told, and the next one has its turn."""

    def failing():
        try:
            yield 1
        finally:
            raise OSError("full")

    mine, steps = turns.Turns(), failing()
    next(steps)
    mine._left.append(steps)
    with pytest.raises(OSError, match="full"), mine:
        pass
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(mine._lock.acquire, timeout=60).result()


@forever
def test_a_threads_own_stream_does_not_wait(llm):
    """It would wait for itself."""
    stream = llm("def f(", max_tokens=50, temperature=0.0, stream=True)
    assert next(stream)
    begin = time.monotonic()
    assert llm("x", max_tokens=4)
    assert time.monotonic() - begin < AT_ONCE
    with pytest.raises(UnsupportedError, match=r"a later generate\(\) has taken the context"):
        list(stream)


BY_HAND = {
    "reset": lambda llm, state: llm.reset(),
    "load_state": lambda llm, state: llm.load_state(state),
    "eval": lambda llm, state: llm.eval([5, 6, 7]),
    "sample": lambda llm, state: llm.sample(temp=0.0),
}


@forever
@pytest.mark.parametrize("speculation", ["mtp", "off"])
@pytest.mark.parametrize("what", BY_HAND)
def test_what_another_thread_does_by_hand_waits_for_a_stream(speculation, what):
    """outlines calls reset() after each completion."""
    with closing(Llama(str(TINY), speculation=speculation, **SETTINGS)) as llm, ThreadPoolExecutor(1) as pool:
        prompt = llm.tokenize(b"def f(")
        llm.eval(prompt)
        state = llm.save_state()
        llm.eval(prompt)
        expected = list(islice(llm.generate(prompt, temp=0.0), 30))
        stream = llm.generate(prompt, temp=0.0)
        got = list(islice(stream, 10))
        done = pool.submit(BY_HAND[what], llm, state)
        time.sleep(0.2)
        assert not done.done()
        got += islice(stream, 20)
        stream.close()
        done.result(AT_ONCE)
    assert got == expected


@pytest.mark.parametrize("settings", [{}, {"exact": False}])
@pytest.mark.parametrize("what", BY_HAND)
def test_a_stream_that_nobody_reads_gives_way_to_what_is_done_by_hand(monkeypatch, what, settings):
    monkeypatch.setattr(turns, "PATIENCE", 0.3)
    settings = {**SETTINGS, **settings}
    with closing(Llama(str(TINY), speculation="off", **settings)) as llm, ThreadPoolExecutor(1) as pool:
        llm.eval(llm.tokenize(b"x"))
        state = llm.save_state()
        stream = llm("def f(", max_tokens=50, stream=True)
        assert next(stream)
        pool.submit(BY_HAND[what], llm, state).result(AT_ONCE)
        with pytest.raises(UnsupportedError, match="in another thread has taken the context"):
            list(stream)


@forever
def test_a_stream_made_elsewhere_is_read_and_changed_in_one_thread(llm):
    """Only who reads it counts, and nobody waits for himself."""
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(llm.generate, llm.tokenize(b"def f("), temp=0.0).result()
        begin = time.monotonic()
        assert next(stream) >= 0
        llm.eval([5, 6])
        llm.reset()
        assert time.monotonic() - begin < AT_ONCE
        del stream
        pool.submit(llm.reset).result(AT_ONCE)


EXIT = """
import threading, time
from draftwood import Llama
from draftwood.generate import turns
turns.PATIENCE = 0.0
llm = Llama({path!r}, **{settings!r}, speculation="off")
stream = llm("def f(", max_tokens=50, stream=True)
next(stream)
endless = dict(max_tokens=400, logit_bias={{llm.token_eos(): -1e9}})
threading.Thread(target=llm.create_completion, args=("x",), kwargs=endless, daemon=True).start()
time.sleep(0.2)
"""


def test_a_process_ends_while_a_thread_has_the_turn():
    script = EXIT.format(path=str(TINY), settings=SETTINGS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_stream_that_is_dropped_waits_for_nobody(monkeypatch):
    """Its end comes with the next turn: who has this one may wait for what the dropping thread holds."""
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    held = Lock()
    with closing(Llama(str(TINY), speculation="mtp", **SETTINGS)) as llm:
        prompt = llm.tokenize(PROMPTS[0].encode())
        expected = list(islice(llm.generate(prompt, temp=0.0), 30))

        def slow(ids: Any, scores: Any) -> Any:
            entered.set()
            with held:
                return scores

        entered = Event()
        stream = llm.generate(prompt, temp=0.0)
        assert next(stream) == expected[0]
        with ThreadPoolExecutor(1) as pool:
            with held:
                whole = pool.submit(llm, "x", max_tokens=2, logits_processor=LogitsProcessorList([slow]))
                assert entered.wait(60)
                del stream
            assert whole.result()
        assert list(islice(llm.generate(prompt, temp=0.0), 30)) == expected


def test_a_stream_that_begins_changes_no_whole_call():
    """Nor its seed, which is set before its sampler is made."""
    sampling = {"max_tokens": 12, "temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    with closing(Llama(str(TINY), speculation="mtp", **SETTINGS)) as llm:
        alone = llm("def f(", seed=7, **sampling)["choices"][0]["text"]
        make, made = llm._init_sampler, Event()

        def slowly(*args: Any, **kwargs: Any) -> Any:
            made.set()
            time.sleep(0.3)
            return make(*args, **kwargs)

        llm._init_sampler = slowly
        stream = llm("x", seed=99, stream=True, **sampling)
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(llm, "def f(", seed=7, **sampling)
            assert made.wait(60)
            first = pool.submit(next, stream)
            assert whole.result()["choices"][0]["text"] == alone
            assert first.result()
        del llm._init_sampler


def test_wrong_arguments_of_generate_are_told_at_the_call():
    with closing(Llama(str(TINY), **SETTINGS)) as llm, pytest.raises(TypeError):
        llm.generate([1], no_such_argument=1)


def test_counters_are_read_beside_a_generation(llm):
    """Another thread sees what was read last: the engine is not asked while it works. Its own thread asks."""
    before, within, go_on, own = llm.speculation_stats, Event(), Event(), []

    def hold(ids: Any, scores: Any) -> Any:
        within.set()
        assert go_on.wait(60)
        own.append(llm.speculation_stats)
        return scores

    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(llm, "def f(", max_tokens=2, logits_processor=LogitsProcessorList([hold]))
        assert within.wait(60)
        assert llm.speculation_stats == before
        assert (llm.tree_refusal, llm.expert_stats, llm.readahead_stats) == ("", None, None)
        reset = pool.submit(llm.reset_speculation_stats)
        time.sleep(0.2)
        assert not reset.done()
        go_on.set()
        assert call.result(60)
        reset.result(60)
    assert own[0].prompt_tokens > before.prompt_tokens
    assert llm.speculation_stats.prompt_tokens == 0


def test_counters_are_read_beside_close(llm):
    before = llm.speculation_stats
    with llm._turns, ThreadPoolExecutor(1) as pool:  # as close() does
        llm._close()
        assert pool.submit(lambda: llm.speculation_stats).result(60) == before
    assert llm.speculation_stats is None
