"""Children forked from a process with a `Llama`: they generate as their parent, or get an error in words."""

from __future__ import annotations

import pytest

FORK = """
import os, signal, sys, threading, time, warnings
from draftwood import Llama, UnsupportedError
from draftwood._llama_cpp.llama import LogitsProcessorList
from draftwood.load import forks

case, model = sys.argv[1:]
settings = {"n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "verbose": False}

def text(llm):
    return llm.create_completion("one two", max_tokens=8, temperature=0.0)["choices"][0]["text"]

def child(llm):
    if case == "same":
        return text(llm)
    if case == "new":
        return text(Llama(model, **settings))
    for call in (lambda: text(llm), lambda: next(llm.generate([1])), lambda: Llama(model, **settings)):
        try:
            call()
        except UnsupportedError as error:
            said = str(error)
        else:
            return "no error"
    llm.close()
    return said

def generate_elsewhere(llm):
    # Returns when the generation is within a step, with a function that lets it go on to its end.
    warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any fork beside a thread
    within, go_on = threading.Event(), threading.Event()
    def hold(ids, scores):
        within.set()
        go_on.wait(240)
        return scores
    settings = {"max_tokens": 4, "logits_processor": LogitsProcessorList([hold])}
    thread = threading.Thread(target=llm.create_completion, args=("three",), kwargs=settings, daemon=True)
    thread.start()
    assert within.wait(120)
    return lambda: (go_on.set(), thread.join())

if case == "old runtime":
    forks._end_threads = lambda: False
llm = Llama(model, **settings)
if case == "card":
    forks.watch(llm._turns, on_card=True)
expected = text(llm)
go_on = generate_elsewhere(llm) if case == "busy" else lambda: None
come, go = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(go, child(llm).encode())
    os._exit(0)
until = time.monotonic() + 120
while os.waitpid(pid, os.WNOHANG) == (0, 0):
    if time.monotonic() > until:
        os.kill(pid, signal.SIGKILL)
        sys.exit("the child hangs")
    time.sleep(0.02)
said = os.read(come, 1 << 16).decode()
go_on()
assert text(llm) == expected, "the parent goes on"
print(said == expected, said)
"""


@pytest.mark.parametrize("case", ["same", "new"])
def test_a_child_generates(gguf, python, case):
    """With OpenMP's threads of the parent in mind it waited for ever."""
    done = python(FORK, case, gguf("planted-moe"), timeout=280)
    assert (done.returncode, done.stdout[:4]) == (0, "True"), done.stderr[-1500:]


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("old runtime", "OpenMP threads, which"),
        ("card", "layers on a card, whose driver"),
        ("busy", "a Llama at work in another thread, which"),
    ],
)
def test_a_child_that_cannot(gguf, python, case, found):
    """With a generation in another thread of the parent it waited for that thread for ever."""
    done = python(FORK, case, gguf("planted-moe"), timeout=280)
    assert done.returncode == 0, done.stderr[-1500:]
    assert f"found a process that was forked from one with {found}" in done.stdout
    assert 'hint: multiprocessing.get_context("spawn"), or make the first Llama in the child' in done.stdout
