"""Tools: a call that a model makes arrives as a call, and is that of plain steps, whatever drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server
from tests.server.test_one_slot import without_ids

TEMPLATES = Path(__file__).resolve().parents[1] / "model" / "templates"
PLACES = {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 2, "maxItems": 3}
DAYS = {"type": "integer", "minimum": 1, "maximum": 7}
PARAMETERS: dict[str, dict[str, Any]] = {
    name: {"type": "object", "properties": properties, "required": list(properties)}
    for name, properties in {"weather": {"places": PLACES, "days": DAYS}, "clock": {"days": DAYS}}.items()
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 160,
}
# tiny-moe opens no call. Here the client has opened it, and only a grammar makes the rest a call.
BEGUN = {**ASKED, "messages": [*ASKED["messages"], {"role": "assistant", "content": "<tool_call>\n"}]}
# Here the model opens it: each of these tokens is the likeliest when those before it were the last three.
OPENS = {
    "logit_bias": [["<", 400], ["tool", 300], ["_call", 200], [">\n", 100]],
    **{"presence_penalty": 350, "repeat_last_n": 3},
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "from its trigger on": ("qwen35", {**ASKED, **OPENS, "tool_choice": "auto"}),
    "from the first token on": ("qwen35", {**BEGUN, "tool_choice": "required"}),
    # a bias against a second call: llama-server lets several come in this format
    "as JSON": ("qwen3", {**BEGUN, "tool_choice": "required", "logit_bias": [["<", -100]]}),
}


def knowing(server: GetServer, spec_type: str, template: str) -> Server:
    """A server whose template knows tools."""
    file = TEMPLATES / f"{template}.jinja"
    return server("-np", "1", "-c", "1024", "--spec-type", spec_type, "--chat-template-file", str(file))


def ask(server: Server, body: dict[str, Any], **more: Any) -> Any:
    return server.post("/v1/chat/completions", {**body, **more})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check_call(choice: Any) -> None:
    """One call and nothing else, its arguments as the schema says."""
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"].get("content")
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == set(PARAMETERS[call["function"]["name"]]["required"])
    assert type(arguments["days"]) is int
    assert 1 <= arguments["days"] <= 7
    if "places" in arguments:
        assert 2 <= len(arguments["places"]) <= 3
        assert set(arguments["places"]) <= {"Paris", "Rome"}


def check_drafts(server: Server, reply: Any) -> None:
    """Rows of drafts were taken, where drafting is certain: "auto" need not draft on a loaded machine."""
    if server.spec_type in ("mtp", "tree"):
        assert reply["timings"]["draft_n"] >= reply["timings"]["draft_n_accepted"] > 0
    elif server.spec_type in ("plain", "none"):
        assert "draft_n" not in reply["timings"]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("spec_type", ["plain", "none", "mtp", "tree", "auto"])
def test_a_call_is_that_of_plain_steps(server: GetServer, spec_type: str, case: str) -> None:
    template, body = CALLS[case]
    drafting = knowing(server, spec_type, template)
    reply = ask(drafting, body, logprobs=True, top_logprobs=2)
    choice = reply["choices"][0]
    check_call(choice)
    check_drafts(drafting, reply)
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
    if spec_type != "none":  # other kernels: their probabilities have other last digits
        plain = ask(knowing(server, "plain", template), body, logprobs=True, top_logprobs=2)
        assert without_ids(choice) == without_ids(plain["choices"][0])


def streamed(server: Server, body: Any) -> tuple[Any, int]:
    """The choice that the pieces of a stream come to, and how many had a part of the arguments."""
    text, call, n_parts, end = "", {"name": "", "arguments": ""}, 0, None
    with requests.post(
        f"{server.url}/v1/chat/completions", json={**body, "stream": True}, stream=True, timeout=60
    ) as reply:
        for line in reply.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                assert part["index"] == 0
                call |= {key: part[key] for key in ("id", "type") if key in part}
                for key, value in part["function"].items():
                    call[key] += value
                    n_parts += key == "arguments" and value != ""
            end = choice["finish_reason"] or end
    function = {"name": call.pop("name"), "arguments": call.pop("arguments")}
    message = {"role": "assistant", "content": text, "tool_calls": [{**call, "function": function}]}
    return {"finish_reason": end, "message": message}, n_parts


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("spec_type", ["plain", "mtp", "tree", "auto"])
def test_a_streamed_call_is_the_whole_one(server: GetServer, spec_type: str, case: str) -> None:
    template, body = CALLS[case]
    drafting = knowing(server, spec_type, template)
    choice, n_parts = streamed(drafting, body)
    check_call(choice)
    assert n_parts > 3
    whole = ask(drafting, body)["choices"][0]["message"]
    assert choice["message"]["content"] == whole["content"]
    assert choice["message"]["tool_calls"][0]["function"] == whole["tool_calls"][0]["function"]


def test_a_streamed_call_has_no_logprobs(server: GetServer) -> None:
    mtp = knowing(server, "mtp", "qwen35")
    body = {**ASKED, "stream": True, "logprobs": True}
    reply = requests.post(f"{mtp.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "logprobs is not supported with tools + stream" in reply.text


@pytest.mark.parametrize("spec_type", ["plain", "mtp", "tree", "auto"])
def test_a_chat_held_to_a_schema_drafts(server: GetServer, spec_type: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "days", "schema": PARAMETERS["weather"]}}
    body = {**ASKED, "tools": [], "response_format": schema}
    drafting = knowing(server, spec_type, "qwen3")
    reply = ask(drafting, body)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"places", "days"}
    check_drafts(drafting, reply)
    assert choice == ask(knowing(server, "plain", "qwen3"), body)["choices"][0]


def test_required_makes_a_call_of_what_auto_leaves_a_text(server: GetServer) -> None:
    """The grammar of "auto" waits for the model to open a call; that of "required" holds every token."""
    mtp = knowing(server, "mtp", "qwen35")
    check_call(ask(mtp, BEGUN, tool_choice="required")["choices"][0])
    for tool_choice in ("auto", "none"):
        choice = ask(mtp, BEGUN, tool_choice=tool_choice)["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"]


@pytest.mark.parametrize(("template", "held"), [("qwen35", False), ("qwen3", True)])
def test_an_enum_of_strings_holds_in_json_alone(server: GetServer, template: str, held: bool) -> None:
    """docs/serving.md says so: llama-server's grammar of Qwen3.5's format takes any text for a string."""
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    reply = ask(knowing(server, "mtp", template), BEGUN, tools=tools, tool_choice="required", max_tokens=40)
    arguments = reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert ('"Paris"' in arguments or '"Rome"' in arguments) == held


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("flat", [False, True], ids=["as in chats", "as in Responses"])
def test_a_named_tool_is_the_one_that_is_called(server: GetServer, name: str, flat: bool) -> None:
    """llama-server alone reads a `tool_choice` that is no string as "auto"."""
    mtp = knowing(server, "mtp", "qwen35")
    choice = ask(mtp, BEGUN, tool_choice={"type": "function", "name": name} if flat else named(name))[
        "choices"
    ][0]
    check_call(choice)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_tool_named_as_anthropics_clients_do_is_called(server: GetServer, name: str) -> None:
    tools = [{"name": each, "input_schema": parameters} for each, parameters in PARAMETERS.items()]
    body = {"messages": BEGUN["messages"], "tools": tools, "temperature": 0, "max_tokens": 160}
    mtp = knowing(server, "mtp", "qwen35")
    reply = mtp.post("/v1/messages", {**body, "tool_choice": {"type": "tool", "name": name}})
    assert {part["name"] for part in reply["content"] if part["type"] == "tool_use"} == {name}
    reply = mtp.post("/v1/messages", {**body, "tool_choice": {"type": "none"}})
    assert {part["type"] for part in reply["content"]} == {"text"}


@pytest.mark.parametrize("name", [["weather"], ["clock"], ["clock", "weather"]], ids=" and ".join)
@pytest.mark.parametrize("flat", [False, True], ids=["as in chats", "as in Responses"])
def test_allowed_tools_are_those_that_can_be_called(server: GetServer, name: list[str], flat: bool) -> None:
    mtp = knowing(server, "mtp", "qwen35")
    tools = [{"type": "function", "name": each} if flat else named(each) for each in name]
    allowed = {"mode": "required", "tools": tools}
    choice = {"type": "allowed_tools", **(allowed if flat else {"allowed_tools": allowed})}
    found = ask(mtp, BEGUN, tool_choice=choice)
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] in name
    given = [tool for tool in TOOLS if tool["function"]["name"] in name]
    same = ask(mtp, BEGUN, tools=given, tool_choice="required")
    assert without_ids(found["choices"][0]) == without_ids(same["choices"][0])


@pytest.mark.parametrize("word", ["auto", "required", "none", "web_search"])
def test_an_object_of_another_type_is_the_word_or_auto(server: GetServer, word: str) -> None:
    mtp = knowing(server, "mtp", "qwen35")
    found = ask(mtp, BEGUN, tool_choice={"type": word})["choices"][0]
    same = ask(mtp, BEGUN, tool_choice="auto" if word == "web_search" else word)["choices"][0]
    assert without_ids(found) == without_ids(same)
    assert ("tool_calls" in found["message"]) is (word == "required")


NONE = "; expected one of the request's tools"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (named("unheard of"), f"found a tool_choice of unheard of{NONE}"),
        ({"type": "function"}, f"found a tool_choice of nothing{NONE}"),
        ({"type": "function", "function": {"name": 5}}, f"found a tool_choice of nothing{NONE}"),
        ({"type": "function", "function": "weather"}, f"found a tool_choice of nothing{NONE}"),
        ({"type": "allowed_tools"}, f"found a tool_choice of nothing{NONE}"),
        ({"type": "allowed_tools", "allowed_tools": 5}, f"found a tool_choice of nothing{NONE}"),
        ({"type": "allowed_tools", "tools": [named("x"), 5]}, f"found a tool_choice of x{NONE}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tools", [TOOLS, [], None, "weather", [5, {"function": None}]], ids=str)
def test_a_choice_of_no_tool_is_refused(server: GetServer, choice: Any, said: str, tools: Any) -> None:
    mtp = knowing(server, "mtp", "qwen35")
    body = {**BEGUN, "tools": tools, "tool_choice": choice}
    reply = requests.post(f"{mtp.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize("tool_choice", ["auto", "required", named("weather")], ids=str)
def test_a_template_without_tools_gives_a_text(server: GetServer, tool_choice: Any) -> None:
    """tiny-moe's own: the prompt has no tool, the reply no call, even if the model writes one."""
    mtp = server("-np", "1", "-c", "1024", "--spec-type", "mtp")
    assert not mtp.get("/props")["chat_template_caps"]["supports_tool_calls"]
    body = {**ASKED, **OPENS, "max_tokens": 24}
    reply = ask(mtp, body, tool_choice=tool_choice)
    without = ask(mtp, {name: value for name, value in body.items() if name != "tools"})
    assert reply["choices"] == without["choices"]
    assert reply["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert reply["choices"][0]["message"]["content"].startswith("<tool_call>\n")
    assert reply["choices"][0]["finish_reason"] == "length"
