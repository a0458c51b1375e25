"""One slot: the text, its probabilities and its limits are those of plain steps, whatever drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from draftwood import Llama

from tests.server.conftest import GetServer
from tests.server.process import DRAFTER, MODEL, Server

TYPES = [("mtp",), ("dflash", "-md", DRAFTER), ("ngram",), ("tree",), ("auto",)]
PROMPTS = ["The quick brown fox", "def add(a, b):\n    return", "1 2 3 4 5 6 7 8 9 10 11 12"]
# what llama-cpp-python's chain has, in its order
SAMPLED = {
    **{"temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "samplers": ["top_k", "top_p", "min_p", "temperature"],
}


@pytest.fixture(params=TYPES, ids=lambda each: each[0])
def drafting(request: pytest.FixtureRequest, server: GetServer) -> Server:
    return server("-np", "1", "-c", "512", "--spec-type", *request.param)


@pytest.fixture
def plain(server: GetServer) -> Server:
    return server("-np", "1", "-c", "512", "--spec-type", "plain")


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(MODEL, n_ctx=512, n_threads=1, n_threads_batch=1, speculation="off", verbose=False)


def seen(reply: Any) -> Any:
    """What a reply says, without times and counters."""
    return (
        reply["content"],
        reply["stop_type"],
        reply["tokens_predicted"],
        reply.get("completion_probabilities"),
    )


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_text_and_probabilities_are_those_of_plain_steps(drafting: Server, plain: Server, how: Any) -> None:
    drafted = accepted = 0
    for prompt in PROMPTS:
        body = {"n_predict": 48, "n_probs": 3, "cache_prompt": False, **how}
        reply = drafting.complete(prompt, **body)
        assert seen(reply) == seen(plain.complete(prompt, **body))
        drafted += reply["timings"].get("draft_n", 0)
        accepted += reply["timings"].get("draft_n_accepted", 0)
    assert drafted >= accepted
    assert accepted > 0 or drafting.spec_type == "auto"  # which need not draft on a loaded machine


@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_text_is_the_librarys(server: GetServer, llama: Llama, how: Any) -> None:
    drafting = server("-np", "1", "-c", "512", "--spec-type", "tree")
    for prompt in PROMPTS:
        reply = drafting.complete(prompt, n_predict=48, **how)
        sampling = {name: value for name, value in how.items() if name != "samplers"} or {"temperature": 0.0}
        own = llama.create_completion(prompt, max_tokens=48, repeat_penalty=1.0, **sampling)
        assert reply["content"] == own["choices"][0]["text"]


@pytest.mark.parametrize("n", range(1, 8))
def test_no_token_more_than_asked_for(drafting: Server, plain: Server, n: int) -> None:
    reply = drafting.complete("1 2 3 4 5 6 7 8", n_predict=n)
    assert reply["tokens_predicted"] == n
    assert seen(reply) == seen(plain.complete("1 2 3 4 5 6 7 8", n_predict=n))


CONSTRAINTS: list[dict[str, Any]] = [
    {"grammar": 'root ::= [a-z]+ (" " [a-z]+)*'},
    {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"logit_bias": [[" the", -8.0], [",", 3.0]]},
    {"repeat_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repeat_last_n": 32},
    {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2},
    {"temperature": 0.8, "seed": 3, "mirostat": 2},
    {"stop": [" a", "\n\n"]},
    {"n_probs": 5, "post_sampling_probs": True, "temperature": 0.7, "seed": 5},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: next(iter(each)))
def test_what_shapes_the_text_sees_each_row(drafting: Server, plain: Server, constraint: Any) -> None:
    body = {"n_predict": 40, **constraint}
    reply = drafting.complete("Once upon a time", **body)
    assert seen(reply) == seen(plain.complete("Once upon a time", **body))
    if drafting.spec_type in ("mtp", "tree"):  # the others find nothing to draft under some of these
        assert reply["timings"]["draft_n_accepted"] > 0, "no row but the first saw the constraint"


def test_a_lazy_grammar_waits_for_its_trigger(drafting: Server, plain: Server) -> None:
    body = {
        "n_predict": 40,
        "grammar": 'root ::= " fox" [ a-z]*',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": " fox"}],
    }
    assert seen(drafting.complete("The quick brown", **body)) == seen(
        plain.complete("The quick brown", **body)
    )


def chat(server: Server, **body: Any) -> Any:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    reply = server.post(
        "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 60, **body}
    )
    return reply["choices"][0]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
]


def without_ids(choice: Any) -> Any:
    text = json.dumps(choice)
    for call in choice["message"].get("tool_calls", ()):
        text = text.replace(call["id"], "id")
    return text


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_tools_and_logprobs_in_a_chat(drafting: Server, plain: Server, tool_choice: str) -> None:
    body = {"tools": TOOLS, "tool_choice": tool_choice, "logprobs": True, "top_logprobs": 2}
    assert without_ids(chat(drafting, **body)) == without_ids(chat(plain, **body))


def test_the_context_ends_where_it_ends_for_plain_steps(drafting: Server, plain: Server) -> None:
    prompt = "one two three four five six seven eight nine ten " * 11
    body = {"n_predict": 600, "ignore_eos": True}
    reply = drafting.complete(prompt, **body)
    assert reply["truncated"]
    assert seen(reply) == seen(plain.complete(prompt, **body))


def test_a_long_prompt_then_a_short_one_then_a_turn_more(drafting: Server, plain: Server) -> None:
    story = "Once upon a time there was a little girl who lived in a house. " * 12
    texts = []
    for each in (drafting, plain):
        first = each.complete(story)["content"]
        turn = each.complete(story + first + " And then")
        assert turn["timings"]["cache_n"] > 0
        texts.append(
            [first, each.complete("The cat")["content"], turn["content"], each.complete(story)["content"]]
        )
    assert texts[0] == texts[1]
