"""Chat beyond upstream's: prompts equal to the bundled server's, replies split, errors in words.

The server renders the same requests with the same template over HTTP. Replies are replayed in place of
`generate`, for no small model writes tool calls. tests/model/test_api_replies.py has the texts.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
import urllib.request
from pathlib import Path

import draftwood
import pytest
from draftwood import Llama, OptionError, UnsupportedError
from draftwood._llama_cpp.llama_chat_format import Jinja2ChatFormatter
from draftwood.api import chat_request
from draftwood.api.chat import ChatOptions

from tests.model.test_api_completion import Replay
from tests.model.test_api_replies import TEMPLATES, TINY, TOOLS, called, tagged
from tests.ports import free_port

HI = [{"role": "user", "content": "hi"}]
SERVER = Path(draftwood.__file__).parent / "bin" / "llama-server"
if not SERVER.exists():  # an editable install keeps the built files beside the private package
    import draftwood._llama_cpp as private

    SERVER = Path(private.__file__).parents[1] / "bin" / "llama-server"

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Oslo", "days": 2}'},
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
]
REQUESTS = {
    "plain": {"messages": HI},
    "no thinking": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}},
    "tools": {"messages": HI, "tools": TOOLS},
    "tools that say little": {"messages": HI, "tools": [{"type": "function", "function": {"name": "a"}}]},
    "turns": {"messages": TURNS},
    "turns with tools, no thinking": {
        "messages": [
            *TURNS,
            {"role": "assistant", "content": "Both."},
            {"role": "user", "content": "ö\n<b> "},
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "thoughts": {
        "messages": [
            *HI,
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            {"role": "user", "content": "y"},
        ]
    },
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def both(request, tmp_path_factory):
    """(ours, ask the server) with the same template."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "t.jinja").write_text(TEMPLATES[request.param])
    port = free_port()
    options = [
        "-m",
        str(TINY),
        "--jinja",
        "--chat-template-file",
        str(folder / "t.jinja"),
        "-c",
        "256",
        "-t",
        "1",
    ]
    command = [SERVER, *options, "--port", str(port), "--no-warmup", "--parallel", "1"]
    log = folder / "log"
    llm = replay(request.param)
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            while not healthy(address):
                assert server.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)
            yield llm, lambda body: post(f"{address}/apply-template", body)["prompt"]
        finally:
            server.terminate()
    llm.close()


def healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
            return answer.status == 200
    except OSError:  # not listening, 503, or too busy to answer
        return False


def post(address, body):
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def replay(template, **settings):
    llm = Replay(str(TINY), n_ctx=512, speculation="off", exact=False, verbose=False, n_threads=1, **settings)
    use(llm, TEMPLATES[template])
    return llm


def use(llm, template):
    """Give a model the template as if its file had it."""
    llm.metadata["tokenizer.chat_template"] = template
    made = Jinja2ChatFormatter(template=template, eos_token="</s>", bos_token="<s>")
    llm._chat_handlers["chat_template.default"] = made.to_chat_handler()


@pytest.fixture
def qwen3():
    llm = replay("qwen3")
    yield llm
    llm.close()


@pytest.fixture
def qwen35():
    llm = replay("qwen35")
    yield llm
    llm.close()


def prompt_of(llm, request):
    """The text that a request is rendered to."""
    llm.reply, seen = [5], []
    tokenize = llm.tokenize
    llm.tokenize = lambda text, **kwargs: (seen.append(text), tokenize(text, **kwargs))[1]
    try:
        llm.create_chat_completion(**{"chat_template_kwargs": {}, **request})
    finally:
        del llm.tokenize
    return seen[0].decode()


@pytest.mark.parametrize("name", REQUESTS)
def test_prompts_are_the_servers(both, name):
    ours, server = both
    assert prompt_of(ours, REQUESTS[name]) == server(REQUESTS[name])


def test_template_arguments_reach_the_template(qwen35):
    ends = [
        prompt_of(qwen35, {"messages": HI, "chat_template_kwargs": {"enable_thinking": on}})[-30:]
        for on in (True, False)
    ]
    assert ends[0].endswith("assistant\n<think>\n")
    assert ends[1].endswith("<think>\n\n</think>\n\n")


def say(llm, text):
    llm.reply = [*llm.tokenize(text.encode(), add_bos=False), llm.token_eos()]


REPLY = "hm\n</think>\n\nlook:\n" + tagged("weather", place="Oslo", days=2) + "\n" + tagged("now")


def test_reply_is_split(qwen35):
    say(qwen35, REPLY)
    asked = {"tools": TOOLS, "reasoning_format": "auto", "parse_tool_calls": True, "max_tokens": 300}
    choice = qwen35.create_chat_completion(HI, **asked)["choices"][0]
    message = choice["message"]
    assert (message["role"], message["reasoning_content"], message["content"]) == (
        "assistant",
        "hm\n",
        "look:\n",
    )
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"place":"Oslo","days":2}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"

    joined = {"reasoning_content": "", "content": ""}
    calls, ends = [], []
    for chunk in qwen35.create_chat_completion(HI, stream=True, **asked):
        part = chunk["choices"][0]
        for key in joined:
            joined[key] += part["delta"].get(key) or ""
        calls += part["delta"].get("tool_calls", [])
        ends.append(part["finish_reason"])
    assert joined == {"reasoning_content": "hm\n", "content": "look:\n"}
    assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
    assert [call["index"] for call in calls] == [0, 1]
    assert ends == [*[None] * (len(ends) - 1), "tool_calls"]


@pytest.mark.parametrize("choice", ["none", {"type": "function", "function": {"name": "now"}}], ids=str)
def test_tool_choice_that_leaves_nothing_to_parse(qwen3, choice):
    say(qwen3, called("now"))
    asked = {"tools": TOOLS, "tool_choice": choice, "parse_tool_calls": True, "max_tokens": 300}
    message = qwen3.create_chat_completion(HI, **asked)["choices"][0]["message"]
    if choice == "none":
        assert message["content"] == called("now")
    else:  # forced: upstream takes the whole reply for its arguments
        assert message["tool_calls"][0]["function"]["arguments"] == called("now")


@pytest.fixture
def tiny():
    llm = Llama(str(TINY), n_ctx=512, n_threads=1, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("options", [{}, {"chat_template_kwargs": {}}], ids=["upstreams", "ours"])
def test_a_json_schema_is_kept_to(tiny, options):
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    for wrapped in ({"json_schema": {"name": "x", "schema": schema}}, {"schema": schema}):
        asked = {"type": "json_schema", **wrapped}
        answer = tiny.create_chat_completion(HI, response_format=asked, max_tokens=40, **options)
        assert json.loads(answer["choices"][0]["message"]["content"])["kind"] in ("a", "b")
    with pytest.raises(OptionError, match="expected a JSON schema in it"):
        tiny.create_chat_completion(HI, response_format={"type": "json_schema", "json_schema": 1})


def test_a_forced_call_is_named_once_in_a_stream(tiny):
    """A client that joins the parts has the call of the whole reply."""
    choice = {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}
    asked = {"tools": TOOLS, "tool_choice": choice, "temperature": 0.0, "max_tokens": 40}
    whole = tiny.create_chat_completion(HI, **asked)["choices"][0]["message"]
    chunks = tiny.create_chat_completion(HI, stream=True, **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [each for delta in deltas for each in delta.get("tool_calls") or []]
    assert len(calls) > 1
    assert "".join(call["function"].get("name", "") for call in calls) == choice["function"]["name"]
    assert (
        "".join(call["function"]["arguments"] for call in calls)
        == (whole["tool_calls"][0]["function"]["arguments"])
    )
    assert [bool(call.get("id")) for call in calls] == [True, *[False] * (len(calls) - 1)]


def test_without_options_the_result_is_upstreams(qwen35):
    say(qwen35, REPLY)
    for stream in (False, True):
        results = []
        for method in (Llama.create_chat_completion, Llama.__mro__[2].create_chat_completion):
            out = method(qwen35, HI, tools=TOOLS, stream=stream, max_tokens=300)
            results.append([strip(part) for part in (out if stream else [out])])
        assert results[0] == results[1]


def strip(part):
    return {key: value for key, value in part.items() if key not in ("id", "created", "timings")}


def test_defaults_of_the_object(qwen3):
    llm = replay("qwen3", reasoning_format="auto", chat_template_kwargs={"enable_thinking": False})
    say(llm, "<think>a</think>b")
    message = llm.create_chat_completion(HI, chat_template_kwargs={"enable_thinking": True})["choices"][0][
        "message"
    ]
    assert (message["reasoning_content"], message["content"]) == ("a", "b")
    assert llm.create_chat_completion(HI)["choices"][0]["message"]["content"] == "<think>a</think>b"
    message = llm.create_chat_completion(HI, reasoning_format="none")["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    state = llm.__getstate__()
    assert (state["reasoning_format"], state["chat_template_kwargs"]) == ("auto", {"enable_thinking": False})
    llm.close()


def test_timings_come_along(qwen3):
    say(qwen3, "one two three")
    n = len(qwen3.reply)
    assert qwen3.create_chat_completion(HI)["timings"]["predicted_n"] == n
    chunks = list(qwen3.create_chat_completion(HI, stream=True))
    assert ["timings" in chunk for chunk in chunks] == [*[False] * (len(chunks) - 1), True]


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"reasoning_format": "deep"}, OptionError, "reasoning_format is 'deep'; expected one of"),
        ({"chat_template_kwargs": "x"}, OptionError, "chat_template_kwargs is 'x'; expected a dict"),
        ({"chat_template_kwargs": {5: 1}}, OptionError, "chat_template_kwargs has a name of type int"),
        *(
            ({"chat_template_kwargs": {name: []}}, OptionError, f"has '{name}', which a chat sets itself")
            for name in ("messages", "tools", "add_generation_prompt", "bos_token")
        ),
        ({"parse_tool_calls": "x"}, OptionError, "parse_tool_calls is 'x'; expected True or False"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(qwen3, asked, error, words):
    with pytest.raises(error, match=words):
        qwen3.create_chat_completion(HI, **asked)
    with pytest.raises(error, match=words):
        Llama(str(TINY), **asked)


def test_chat_formats_without_the_files_template(qwen3):
    qwen3.chat_format = "llama-2"
    with pytest.raises(UnsupportedError, match="found chat_format='llama-2'") as caught:
        qwen3.create_chat_completion(HI, reasoning_format="auto")
    assert 'chat_format="chat_template.default"' in caught.value.hint
    qwen3.chat_format, qwen3.chat_handler = "chat_template.default", lambda **kwargs: None
    with pytest.raises(UnsupportedError, match="found a chat_handler"):
        qwen3.create_chat_completion(HI, chat_template_kwargs={})


def test_a_file_without_a_template_is_said_once(llama_arch):
    """Upstream formats such a chat for Llama 2 and says so if verbose; to other models "</s>" may end it."""
    llm = Llama(llama_arch, n_ctx=256, verbose=False)
    with pytest.warns(UserWarning, match="found no chat template in the model file; .*llama-2") as seen:
        first = llm.create_chat_completion(HI, max_tokens=4, temperature=0.0)
    assert (len(seen), seen[0].filename) == (1, __file__)
    assert llm.create_chat_completion(HI, max_tokens=4, temperature=0.0)["choices"] == first["choices"]
    llm.close()
    llm = Llama(llama_arch, n_ctx=256, verbose=False, chat_format="llama-2")  # chosen: nothing is said
    assert llm.create_chat_completion(HI, max_tokens=4, temperature=0.0)["choices"] == first["choices"]
    llm.close()
    llm = Llama(llama_arch, n_ctx=256, verbose=False)
    llm.chat_format = "chatml"
    llm.create_chat_completion(HI, max_tokens=4, temperature=0.0)
    llm.create_completion("hi", max_tokens=4)
    llm.close()


@pytest.mark.parametrize("asked", [{"reasoning_format": "auto"}, {"chat_template_kwargs": {}}], ids=str)
@pytest.mark.parametrize("chosen", ["llama-2", "chatml"])
def test_options_with_a_file_without_a_template(llama_arch, asked, chosen):
    llm = Llama(llama_arch, n_ctx=256, verbose=False, chat_format=chosen)
    with pytest.raises(UnsupportedError, match="found no chat template in the model file; ") as caught:
        llm.create_chat_completion(HI, **asked)
    assert "chat_format=...) chooses how messages are formatted" in str(caught.value.hint)
    llm.close()


def test_the_files_template_by_its_name(tiny):
    llm = Llama(str(TINY), n_ctx=512, n_threads=1, verbose=False, chat_format="chat_template.default")
    asked = {"reasoning_format": "auto", "max_tokens": 4, "temperature": 0.0}
    assert strip(llm.create_chat_completion(HI, **asked)) == strip(tiny.create_chat_completion(HI, **asked))
    llm.close()


def test_templates_without_tool_calls(qwen3):
    qwen3.metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    with pytest.raises(UnsupportedError, match="template without <tool_call>"):
        qwen3.create_chat_completion(HI, tools=TOOLS, parse_tool_calls=True)


ASKED = pytest.mark.parametrize("asked", [{}, {"chat_template_kwargs": {}}], ids=["upstreams", "ours"])


def with_call(**function):
    call = {"type": "function", "function": {"name": "now", **function}}
    return [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, *HI]


WALKS = [
    "for name, value in call.arguments | items",
    "for name, value in call.arguments|items",
    "for name, value in (call.arguments)|items",
    'for name, value in call["arguments"]|items',
    "for name, value in call.arguments | dictsort",
    "for name, value in call.arguments.items()",
    "set tool_args = call.arguments %}{% for name, value in tool_args|items",
    "for name in call.arguments.keys() %}{% set value = call.arguments[name]",
]


@ASKED
@pytest.mark.parametrize("walk", WALKS)
def test_arguments_in_text_can_be_walked_through(qwen35, asked, walk):
    assert TEMPLATES["qwen35"].count(WALKS[0]) == 1
    use(qwen35, TEMPLATES["qwen35"].replace(WALKS[0], walk))
    given = json.dumps({"days": 2, "place": "Oslo"})
    prompts = [
        prompt_of(qwen35, {"chat_template_kwargs": None, "messages": with_call(arguments=each), **asked})
        for each in (given, json.loads(given))
    ]
    assert "<parameter=days>\n2\n</parameter>\n<parameter=place>\nOslo\n</parameter>" in prompts[0]
    assert prompts[0] == prompts[1]


PRINTS_OR_WALKS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% set _args = call.function.arguments %}"
    "{% if _args is string %}{{ _args }}{% else %}{% for name, value in _args|items %}{{ name }}{% endfor %}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@ASKED
@pytest.mark.parametrize("text", ['{"place":  "Oslo"}', '{"place": "Os', "no JSON"])
@pytest.mark.parametrize("template", [TEMPLATES["qwen3"], PRINTS_OR_WALKS], ids=["qwen3", "both"])
def test_arguments_stay_text_for_a_template_that_prints_them(qwen3, asked, template, text):
    use(qwen3, template)
    request = {"chat_template_kwargs": None, "messages": with_call(arguments=text), **asked}
    assert text in prompt_of(qwen3, request)


@ASKED
def test_a_template_that_fails_on_objects_too(qwen35, asked):
    use(qwen35, TEMPLATES["qwen35"].replace("'<parameter=' + name", "'<parameter=' + no_name"))
    with pytest.raises(UnsupportedError, match="template failed on this request: 'no_name' is undefined"):
        qwen35.create_chat_completion(with_call(arguments='{"place": "Oslo"}'), **asked)


@ASKED
@pytest.mark.parametrize("text", ["{", "[1]", "null", '"x"'])
def test_arguments_that_are_no_object(qwen35, asked, text):
    with pytest.raises(OptionError, match="whose arguments are no JSON object"):
        qwen35.create_chat_completion(with_call(arguments=text), **asked)


@ASKED
@pytest.mark.parametrize("text", ["", " \n"])
def test_blank_arguments_are_none(qwen35, asked, text):
    request = {"chat_template_kwargs": None, "messages": with_call(arguments=text), **asked}
    assert "<function=now>\n</function>" in prompt_of(qwen35, request)


@ASKED
def test_calls_that_lack_arguments_are_left_to_the_template(qwen35, asked):
    request = {"chat_template_kwargs": None, "messages": with_call(), **asked}
    assert "<function=now>\n</function>" in prompt_of(qwen35, request)


@pytest.mark.parametrize("asked", [{}, {"reasoning_format": "auto"}], ids=["upstreams", "ours"])
@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([*HI, {"role": "assistant", "content": None}, {"role": "tool", "content": None}], "can only conc"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "can only concatenate str"),
        ([{"role": "user"}], "undefined|has no attribute"),
    ],
    ids=["no content", "parts", "no key"],
)
def test_messages_that_the_template_cannot_join(qwen35, asked, messages, found):
    use(qwen35, "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")
    with pytest.raises(UnsupportedError, match=f"chat template failed on this request: .*({found})"):
        qwen35.create_chat_completion(messages, **asked)


def test_a_processors_own_error_comes_through(qwen35):
    def processor(ids, scores):
        raise TypeError("mine")

    llm = Llama(str(TINY), n_ctx=256, n_threads=1, verbose=False)
    with pytest.raises(TypeError, match=r"^mine$"):
        llm.create_chat_completion(HI, logits_processor=[processor], max_tokens=2)
    llm.close()


PARSES = {"parse_tool_calls": True}
NOW = {"type": "function", "function": {"name": "now"}}
NO_PARAMETERS = {"name": "now", "parameters": None}


@pytest.mark.parametrize(
    ("tools", "asked"),
    [
        ("weather", {}),
        (["weather"], {}),
        ({"name": "now"}, {}),
        ([{"name": "now"}], PARSES),
        ([{"type": "function", "function": {}}], {"chat_template_kwargs": {}}),
        ([{"type": "function", "function": "now"}], {"tool_choice": NOW}),
        ([{"function": {"name": "now", "parameters": ["x"]}}], PARSES),
    ],
    ids=str,
)
def test_tools_that_are_none(qwen35, tools, asked):
    with pytest.raises(
        OptionError, match=r"found tools=.*; expected a list of dicts, each with a function's"
    ):
        qwen35.create_chat_completion(HI, tools=tools, **asked)


@pytest.mark.parametrize("choice", [{"type": "function", "name": "now"}, {"function": {}}], ids=str)
def test_a_tool_choice_that_names_none(qwen3, choice):
    with pytest.raises(OptionError, match="expected a function's name in it"):
        qwen3.create_chat_completion(HI, tools=TOOLS, tool_choice=choice)


def test_functions_that_are_none(qwen3):
    with pytest.raises(OptionError, match="found functions="):
        qwen3.create_chat_completion(HI, functions=[{}], function_call={"name": "now"})


def test_tools_of_another_shape_are_left_to_the_template(qwen3):
    bare = [{"name": "now"}]
    assert json.dumps(bare[0]) in prompt_of(
        qwen3, {"chat_template_kwargs": None, "tools": bare, "messages": HI}
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [NOW], "tool_choice": NOW},
        {"tools": [{"type": "function", "function": NO_PARAMETERS}], "tool_choice": NOW},
        {"functions": [{"name": "now"}], "function_call": {"name": "now"}},
        {"functions": [NO_PARAMETERS], "function_call": {"name": "now"}},
    ],
    ids=["tools", "tools, null", "functions", "functions, null"],
)
def test_a_forced_function_without_parameters_is_called(tiny, asked):
    message = tiny.create_chat_completion(HI, max_tokens=40, temperature=0.0, **asked)["choices"][0][
        "message"
    ]
    assert message["tool_calls"][0]["function"]["name"] == "now"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ({"max_token": 5}, "max_tokens=5 in place of max_token"),
        ({"max_completion_tokens": 5}, "max_tokens=5 in place of max_completion_tokens"),
        ({"topk": 3}, "top_k=3 in place of topk"),
        ({"reasoning_fromat": "auto"}, "reasoning_format='auto' in place of reasoning_fromat"),
        ({"n": 2}, "leave n out, and make one call for each choice"),
        ({"user": "a", "store": True}, "leave user out; leave store out"),
        ({"parallel_tool_calls": False}, "leave parallel_tool_calls out"),
        ({"enable_thinking": False}, "chat_template_kwargs={'enable_thinking': False}"),
        ({"reasoning_effort": "low", "x": 1}, "chat_template_kwargs={'reasoning_effort': 'low', 'x': 1}"),
    ],
    ids=str,
)
def test_arguments_that_nobody_knows(qwen3, unknown, hint):
    with pytest.raises(TypeError, match=r"unexpected keyword argument '\w+'; expected its own") as caught:
        qwen3.create_chat_completion(HI, **unknown)
    assert str(caught.value).partition("\n\nhint: ")[2] == hint


def test_each_chat_option_is_known_to_the_advice():
    assert set(chat_request._OURS) == {field.name for field in dataclasses.fields(ChatOptions)}
