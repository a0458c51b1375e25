"""Requests that ask llama.cpp to parse too much: a 400 in words, and the server goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server

DEEP = 100_000


@pytest.fixture(scope="module")
def usual(server: GetServer) -> Server:
    return server("-c", "1024", "-np", "2", "-no-kvu", "--spec-type", "auto")


def nested(begin: str, n: int, end: str) -> str:
    return begin * n + "1" + end * n


ARRAYS = nested("[", DEEP, "]")
CHAIN = "".join(f"r{i} ::= r{i + 1}\n" for i in range(DEEP)) + f'r{DEEP} ::= "a"\nroot ::= r0'

# one that wants a call's arguments as an object
TEMPLATE = """{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}
{% for name, value in call.function.arguments | items %}{{ name }}{{ value | tojson }}{% endfor %}
{% endfor %}{% endfor %}"""


def post(server: Server, path: str, body: str) -> requests.Response:
    return requests.post(
        server.url + path, data=body, headers={"Content-Type": "application/json"}, timeout=120
    )


def refused(server: Server, path: str, body: Any) -> str:
    """Send what is to be refused, and something right behind it; return the words of the refusal."""
    begin = time.monotonic()
    reply = post(server, path, body if isinstance(body, str) else json.dumps(body))
    assert reply.status_code == 400, reply.text[:300]
    assert time.monotonic() - begin < 60
    assert server.complete("a", n_predict=2)["tokens_predicted"] == 2
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", f'{{"prompt": {ARRAYS}}}'),
        ("/completion", nested('{"prompt": ', DEEP, "}")),
        ("/v1/completions", f'{{"prompt": {ARRAYS}}}'),
        (
            "/v1/chat/completions",
            f'{{"messages": [{{"role": "user", "content": {ARRAYS}}}]}}',
        ),
        ("/v1/chat/completions", f'{{"messages": [], "chat_template_kwargs": {ARRAYS}}}'),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
            f'{{"name": "f", "parameters": {nested("""{"type": "array", "items": """, DEEP, "}")}}}}}]}}',
        ),
        ("/completion", f'{{"prompt": "a", "json_schema": {nested("""{"items": """, DEEP, "}")}}}'),
        ("/embedding", f'{{"content": {ARRAYS}}}'),
        ("/tokenize", f'{{"content": {ARRAYS}}}'),
        ("/v1/responses", f'{{"input": {ARRAYS}}}'),
        ("/v1/messages", f'{{"messages": {ARRAYS}}}'),
    ],
)
def test_deep_json(usual: Server, path: str, body: str) -> None:
    words = refused(usual, path, body)
    assert words == "found 201 objects and arrays in each other; expected at most 200"


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    answer = {"role": "tool", "tool_call_id": "1", "content": "a"}
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"messages": [{"role": "user", "content": "a"}, said, answer]}


def test_deep_json_in_the_arguments_of_a_call(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--chat-template-file", str(template))
    try:
        server.wait()
        assert "found 201 objects and arrays" in refused(server, "/v1/chat/completions", call(ARRAYS))
        server.post("/v1/chat/completions", {**call('{"a": [1]}'), "max_tokens": 2})
    finally:
        server.close()


@pytest.mark.parametrize("key", ["$ref", "\\u0024ref", "\\u0024\\u0072\\u0065\\u0066"])
def test_references_that_lead_to_each_other(usual: Server, key: str) -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(30_000)}
    schema = {"$defs": {**links, "d30000": {"type": "null"}}, "$ref": "#/$defs/d0"}
    body = json.dumps({"prompt": "a", "json_schema": schema}).replace("$ref", key)
    reply = post(usual, "/completion", body)
    words = reply.json()["error"]["message"]
    assert words == "found 2001 references of JSON schemas; expected at most 2000"
    few = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}, "$ref": "#/$defs/a"}
    assert usual.complete("a", json_schema=few)["content"] == "null"


@pytest.mark.parametrize(("kind", "value"), [(2, "(" * DEEP), (2, "a" * DEEP), (1, "a" * DEEP)])
def test_triggers_of_lazy_grammars(usual: Server, kind: int, value: str) -> None:
    lazy = {"grammar": 'root ::= "a"', "grammar_lazy": True, "prompt": "a"}
    words = refused(usual, "/completion", {**lazy, "grammar_triggers": [{"type": kind, "value": value}]})
    assert f"found {DEEP} bytes of a grammar's trigger; expected at most 4096" in words
    few = [{"type": 2, "value": "(zzz)" * 500}]
    assert usual.post("/completion", {**lazy, "grammar_triggers": few, "n_predict": 2})["tokens_predicted"]


def test_json_as_deep_as_is_allowed(usual: Server) -> None:
    schema = nested('{"type": "array", "maxItems": 1, "items": ', 190, "}").replace("1}", "{}}", 1)
    body = f'{{"prompt": "a", "n_predict": 4, "json_schema": {schema}}}'
    assert post(usual, "/completion", body).status_code == 200
    brackets = json.dumps({"prompt": "[{" * 150 + '"' + "[" * 300, "n_predict": 2})
    assert post(usual, "/completion", brackets).status_code == 200


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (f'root ::= {"(" * DEEP}"a"{")" * DEEP}', "2001 groups in each other in a grammar"),
        (CHAIN, "20001 rules"),
        ('root ::= ((("abcdefgh"{1000}){1000}){1000})', "elements in the repetitions of a grammar"),
        ('root ::= "a"' + " " * (5 << 20), "bytes of grammar"),
    ],
    ids=["groups", "rules", "repetitions", "size"],
)
def test_grammars(usual: Server, grammar: str, words: str) -> None:
    assert words in refused(usual, "/completion", {"prompt": "a", "grammar": grammar})


def test_grammars_that_only_look_deep(usual: Server) -> None:
    grammar = 'root ::= "' + "(" * 5000 + '" [(((("] # ' + "(" * 5000 + '\nother ::= "a"{1000} [^x]{3,10}\n'
    reply = usual.complete("a", n_predict=2, grammar=grammar)
    assert reply["content"].startswith("(")


def test_patterns_of_schemas(usual: Server) -> None:
    deep = {"type": "string", "pattern": "^" + "(" * DEEP + "a" + ")" * DEEP + "$"}
    words = refused(usual, "/completion", {"prompt": "a", "json_schema": deep})
    assert "1001 groups in each other in a pattern" in words
    wide = {"type": "string", "pattern": "^((((a{1000}){1000}){1000}){1000})$"}  # a rule for each group
    assert usual.complete("a", n_predict=8, json_schema=wide)["content"].startswith('"aaa')


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_texts_longer_than_the_context(usual: Server, path: str) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * (22 << 20 >> 5)  # 31 MB
    is_chat = "chat" in path
    body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    before = most_memory(usual)
    words = refused(usual, path, body)
    assert "the prompt is longer than the context" in words
    assert "expected fewer than 1024" in words or "expected fewer than 512" in words
    assert most_memory(usual) - before < 1 << 30


def test_texts_of_an_array_are_one_prompt(usual: Server) -> None:
    """The first of them is too long: the others are not tokenized."""
    text, times = "some words " * 90_000, [cpu_time(usual)]
    usual.post("/tokenize", {"content": text})
    times.append(cpu_time(usual))
    words = refused(usual, "/completion", {"prompt": [1, *[text] * 30]})
    times.append(cpu_time(usual))
    assert "the prompt is longer than the context" in words
    assert times[2] - times[1] < 10 * (times[1] - times[0])


def cpu_time(server: Server) -> float:
    """Return the seconds that it has computed: those are its own, whoever has the cores meanwhile."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_memory(server: Server) -> int:
    """Return its largest resident size so far, in bytes."""
    with open(f"/proc/{server.process.pid}/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_a_long_text_is_counted_where_nothing_is_generated(usual: Server) -> None:
    text = "word " * (3 << 20 >> 2)
    assert len(usual.post("/tokenize", {"content": text})["tokens"]) > 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", '{"prompt": "a"'),
        ("/completion", '{"prompt": "a", "n_predict": NaN}'),
        ("/v1/chat/completions", "no JSON"),
        ("/slots/0?action=save", "{}"),
        ("/tokenize", '{"content": "\\ud800"}'),
    ],
)
def test_what_is_no_request(server: GetServer, path: str, body: str) -> None:
    refused(server("-np", "1", "-c", "512", "--spec-type", "plain"), path, body)
