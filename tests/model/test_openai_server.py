"""llama-cpp-python's server with our corrections: real HTTP, the trained tiny model."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draftwood
import httpx
import pytest
import uvicorn
from draftwood import Llama
from draftwood.server import stream

upstream: Any = importlib.import_module(f"{draftwood.install().__name__}.server.app")

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf")
PROMPTS = ["def f(", "class A"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "user", "content": "hi"}]
UNKNOWN = {"type": "function", "function": {"name": "no"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "add"}}
EOS = 2
LONG = {"prompt": "def f(", "max_tokens": 3000, "min_tokens": 3000, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    settings = upstream.Settings(model=MODEL, n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)
    app = upstream.create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as made:
        yield made
    server.should_exit = True
    thread.join()
    upstream._llama_proxy.free()


@contextmanager
def settings(**changed: Any) -> Iterator[None]:
    before = upstream._server_settings
    upstream.set_server_settings(before.model_copy(update=changed))
    try:
        yield
    finally:
        upstream.set_server_settings(before)


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(reply: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in reply["choices"]
    ]


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, and see it end as streams do."""
    for line in lines:
        if line == "data: [DONE]":
            break
        if line.startswith("data: "):
            yield json.loads(line[len("data: ") :])
    else:
        pytest.fail("the stream ended without [DONE]")
    assert not [line for line in lines if line]


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        return list(events(reply.iter_lines()))


def ends(chunks: list[dict[str, Any]]) -> list[tuple[int, str]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]


def text_of(chunks: list[dict[str, Any]], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


def test_our_class_answers_and_says_how_long_it_took(client):
    assert upstream.llama_cpp.Llama is Llama
    reply = ask(client, COMPLETIONS, prompt=PROMPTS[0], **GREEDY)
    assert reply["timings"]["predicted_n"] == reply["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    assert ask(client, "/v1/engines/copilot-codex/completions", prompt="a", max_tokens=1)["choices"]


# ---- several choices ----


def test_each_prompt_of_a_list_has_its_choice(client):
    alone = [ask(client, COMPLETIONS, prompt=prompt, **GREEDY) for prompt in PROMPTS]
    reply = ask(client, COMPLETIONS, prompt=PROMPTS, **GREEDY)
    assert texts(reply) == [text for each in alone for text in texts(each)]
    assert len(set(texts(reply))) == 2
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert reply["usage"][name] == sum(each["usage"][name] for each in alone)


def test_prompts_may_be_tokens(client):
    tokens = [ask(client, "/extras/tokenize", input=prompt)["tokens"] for prompt in PROMPTS]
    expected = texts(ask(client, COMPLETIONS, prompt=PROMPTS, **GREEDY))
    assert texts(ask(client, COMPLETIONS, prompt=tokens, **GREEDY)) == expected
    assert texts(ask(client, COMPLETIONS, prompt=tokens[1], **GREEDY)) == expected[1:]


@pytest.mark.parametrize(
    ("path", "what"), [(COMPLETIONS, {"prompt": "def"}), (CHATS, {"messages": MESSAGES})]
)
def test_n_choices_are_those_of_seeds_in_a_row(client, path, what):
    sampled = {**what, "max_tokens": 12, "temperature": 1.5}
    alone = [ask(client, path, **sampled, seed=seed) for seed in (7, 8, 9)]
    reply = ask(client, path, **sampled, seed=7, n=3)
    assert texts(reply) == [text for each in alone for text in texts(each)]
    assert len(set(texts(reply))) == 3
    assert reply["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in alone)


def test_min_tokens_hold_for_every_choice(client):
    body = {"prompt": ["a", "b " * 50], "n": 2, "logit_bias": {str(EOS): 100.0}, "temperature": 0}
    assert ask(client, COMPLETIONS, **body)["usage"]["completion_tokens"] == 0
    assert ask(client, COMPLETIONS, **body, min_tokens=8)["usage"]["completion_tokens"] == 4 * 8


# ---- streams ----


@pytest.mark.parametrize(
    ("path", "what", "count"), [(COMPLETIONS, {"prompt": PROMPTS}, 4), (CHATS, {"messages": MESSAGES}, 2)]
)
def test_a_stream_has_all_choices_and_their_usage(client, path, what, count):
    body = {**what, "n": 2, "seed": 7, "temperature": 1.2, "max_tokens": 30, "stop": ["\n"]}
    whole = ask(client, path, **body)
    *chunks, last = streamed(client, path, **body, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(count)] == texts(whole)
    assert ends(chunks) == [(choice["index"], choice["finish_reason"]) for choice in whole["choices"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}]
)
def test_usage_is_for_those_who_ask(client, options):
    chunks = streamed(client, COMPLETIONS, prompt="def f(", **GREEDY, **options)
    assert not [chunk for chunk in chunks if "usage" in chunk or not chunk["choices"]]


def test_a_stream_that_is_cut_off_says_so_for_every_choice(client):
    n = 32  # minutes, were it not cut off: whoever asks for the model comes in time
    body = {**LONG, "n": n, "stream_options": {"include_usage": True}}
    with client.stream("POST", COMPLETIONS, json=body) as reply:
        chunks = events(reply.iter_lines())
        got = [next(chunks) for _ in range(20)]
        assert texts(ask(client, COMPLETIONS, prompt="def f(", **GREEDY))[0]
        *got[20:], last = chunks
    assert ends(got) == [(i, "length") for i in range(n)]
    assert 20 <= last["usage"]["completion_tokens"] < n * LONG["max_tokens"]


def test_a_stream_is_whole_where_others_wait(client):
    with settings(interrupt_requests=False), client.stream("POST", COMPLETIONS, json=LONG) as reply:
        chunks = events(reply.iter_lines())
        next(chunks)
        other = threading.Thread(target=ask, args=(client, COMPLETIONS), kwargs={"prompt": "a", **GREEDY})
        other.start()
        *_, last = chunks
        other.join()
    assert last["timings"]["predicted_n"] == LONG["max_tokens"]


def test_the_list_of_models_neither_waits_nor_cuts_off(client):
    with client.stream("POST", COMPLETIONS, json=LONG) as reply:
        chunks = events(reply.iter_lines())
        next(chunks)
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
        *_, last = chunks
    assert last["timings"]["predicted_n"] == LONG["max_tokens"]


def test_a_client_that_leaves_gives_the_model_back(client):
    with settings(interrupt_requests=False):
        with client.stream("POST", COMPLETIONS, json={**LONG, "n": 128}) as reply:  # minutes
            next(reply.iter_lines())
        began = time.monotonic()
        ask(client, COMPLETIONS, prompt="def f(", **GREEDY)
        assert time.monotonic() - began < 60


# ---- formats ----


@pytest.mark.parametrize(
    "schema", [{"json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, {"schema": SCHEMA}]
)
def test_a_reply_is_held_to_a_schema(client, schema):
    body = {"messages": MESSAGES, "max_tokens": 100, "response_format": {"type": "json_schema", **schema}}
    whole = texts(ask(client, CHATS, **body, seed=3))[0]
    assert set(json.loads(whole)) == {"a"}
    assert text_of(streamed(client, CHATS, **body, seed=3), 0) == whole


def test_a_forced_tool_is_named_once_in_a_stream(client):
    body = {"messages": MESSAGES, "max_tokens": 100, "tools": [TOOL], "tool_choice": FORCED, "seed": 3}
    chunks = streamed(client, CHATS, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["add"]
    assert len([call for call in calls if call.get("id")]) == 1
    arguments = "".join(call["function"]["arguments"] for call in calls)
    message = ask(client, CHATS, **body)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert set(json.loads(arguments)) == {"a"}
    assert ends(chunks) == [(0, "tool_calls")]


def test_fields_of_newer_clients(client):
    reply = ask(client, CHATS, messages=MESSAGES, max_completion_tokens=3, temperature=0)
    assert reply["usage"]["completion_tokens"] == 3
    plain = ask(client, CHATS, messages=MESSAGES, max_tokens=3, reasoning_format="auto")
    assert plain["choices"][0]["message"]["role"] == "assistant"
    rows = ask(client, CHATS, messages=MESSAGES, **GREEDY, logprobs=True, top_logprobs=3)["choices"][0][
        "logprobs"
    ]
    assert [len(row["top_logprobs"]) for row in rows["content"]] == [3] * GREEDY["max_tokens"]


# ---- errors ----

WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "max_tokens: Input should be a"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
    (COMPLETIONS, {"prompt": "a", "grammar": "root ::= ["}, None, "llama.cpp cannot parse"),
    (COMPLETIONS, {"prompt": "a " * 5000}, "messages", "maximum context length is 4096 tokens"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999999": 1}}, None, "in logit_bias; expected 0 to"),
    (CHATS, {"messages": "hi"}, "messages", "messages: Input should be a valid list"),
    (CHATS, {"messages": MESSAGES, "reasoning_format": "x"}, None, "expected one of"),
    (CHATS, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": UNKNOWN}, None, "no"),
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "words"), WRONG)
def test_wrong_requests_are_400_with_the_reason(client, capfd, path, body, param, words, is_stream):
    reply = client.post(path, json={**body, "stream": is_stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert "Traceback" not in capfd.readouterr().err
    assert ask(client, COMPLETIONS, prompt="a", max_tokens=1)


def test_stream_options_are_for_streams(client):
    reply = client.post(COMPLETIONS, json={"prompt": "a", "stream_options": {"include_usage": True}})
    assert (reply.status_code, "expected stream=true" in reply.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"prompt": "\xff"}', b"[" * 100_000])
def test_what_is_no_json_object_is_400(client, body):
    reply = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert "body" in error["message"]
    assert error["param"] in (None, "body")


def test_unforeseen_errors_are_500_and_named(client, monkeypatch, capfd):
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Llama, "_create_completion", fail)
    for is_stream in (False, True):
        reply = client.post(COMPLETIONS, json={"prompt": "a", "stream": is_stream})
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, "AssertionError")
        assert "Traceback" in capfd.readouterr().err


def test_an_error_behind_the_first_event_is_an_event(client, monkeypatch):
    monkeypatch.setattr(stream, "PATIENCE", 0.0)
    with client.stream("POST", COMPLETIONS, json={"prompt": "a " * 5000, "stream": True}) as reply:
        assert reply.status_code == 200
        events = [line for line in reply.iter_lines() if line.startswith("data: ")]
    assert [json.loads(event[6:])["error"]["code"] for event in events] == ["context_length_exceeded"]


def test_no_key_no_page_and_no_such_method(client):
    with settings(api_key="secret"):
        for path, method in ((COMPLETIONS, "POST"), ("/v1/models", "GET"), ("/extras/tokenize", "POST")):
            reply = client.request(method, path, json={"prompt": "a", "input": "a"})
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        key = {"Authorization": "Bearer secret"}
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, headers=key).status_code == 200
    for reply, status in ((client.get("/nowhere"), 404), (client.get(COMPLETIONS), 405)):
        assert (reply.status_code, "message" in reply.json()["error"]) == (status, True)
