"""Reasoning, content and tool calls: what llama.cpp's own parser (the bundled server's) makes of a text.

The table below is checked against that parser in `make test-full`, where a small program of ours is compiled
with llama.cpp's headers and the wheel's library (chat_oracle.cpp). Texts on which it fails or drops something
are listed apart: there ours keeps the text.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import draftwood._llama_cpp as private
import pytest
from draftwood.api.replies import Splitter, opening_of, split
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
TEMPLATES = {path.stem: path.read_text() for path in (HERE / "templates").glob("*.jinja")}


def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    tool("weather", place="string", days="integer", exact="boolean", tags="array", opts="object"),
    tool("now"),
]
THINKING = {
    "free": ("qwen3", True),
    "open": ("qwen35", True),
    "closed": ("qwen35", False),
    "closed3": ("qwen3", False),
}


def called(name, arguments="{}"):
    """A call in JSON, as Qwen3 writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tagged(name, **arguments):
    """A call in tags, as Qwen3.5 writes it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


# thinking, reply -> reasoning, content, calls
TABLE = [
    ("free", "plain", "", "plain", []),
    ("free", "  lead and trail  \n", "", "lead and trail  \n", []),
    ("free", "<think>\nhm\n</think>\n\nanswer", "hm\n", "answer", []),
    ("free", "<think>\nnever ends", "never ends", "", []),
    ("free", "<think></think>x", "", "x", []),
    ("free", "a <think>b</think> c", "", "a <think>b</think> c", []),
    ("free", "", "", "", []),
    (
        "free",
        called("weather", '{"place": "Oslo", "days": 2}'),
        "",
        "",
        [("weather", '{"place": "Oslo", "days": 2}')],
    ),
    ("free", "first\n" + called("now"), "", "first\n", [("now", "{}")]),
    ("free", "<think>\nhm\n</think>\n\n" + called("now"), "hm\n", "", [("now", "{}")]),
    ("free", f"{called('now')}\n{called('weather', '{}')}", "", "", [("now", "{}"), ("weather", "{}")]),
    ("free", "<think>hm\n" + called("now"), "hm\n" + called("now"), "", []),
    ("free", called("weather", r'{"place":"a\"b\n"}'), "", "", [("weather", r'{"place":"a\"b\n"}')]),
    ("closed3", "  x", "", "  x", []),
    ("closed3", "<think>\nhm\n</think>\n\nx", "", "<think>\nhm\n</think>\n\nx", []),
    ("closed3", called("now"), "", "", [("now", "{}")]),
    ("open", "hm\n</think>\n\nanswer", "hm\n", "answer", []),
    ("open", "never ends", "never ends", "", []),
    ("open", "hm</think>x", "hm", "x", []),
    ("open", "\n</think>\n\nx", "", "x", []),
    ("open", "  a \n b \n\n</think>\n\n\n x  \n", "a \n b \n\n", "x  \n", []),
    ("open", tagged("now"), "", "", [("now", "{}")]),
    ("open", "hm\n" + tagged("now"), "hm\n", "", [("now", "{}")]),
    ("open", "hm\n</think>\n\ntext\n\n" + tagged("now"), "hm\n", "text\n\n", [("now", "{}")]),
    ("open", "</think>" + tagged("weather", place="5"), "", "", [("weather", '{"place":"5"}')]),
    ("open", "</think>" + tagged("weather", place="a\nb"), "", "", [("weather", r'{"place":"a\nb"}')]),
    ("open", "</think>" + tagged("weather", place=' "q" '), "", "", [("weather", r'{"place":" \"q\" "}')]),
    (
        "open",
        "</think>" + tagged("weather", days="2", exact="true", tags='["x", 1]', opts='{"a": null}'),
        "",
        "",
        [("weather", '{"days":2,"exact":true,"tags":["x", 1],"opts":{"a": null}}')],
    ),
    ("open", f"</think>{tagged('now')}\n{tagged('now')}", "", "", [("now", "{}"), ("now", "{}")]),
    ("open", "hm</think><function=now>\n</function>", "hm", "<function=now>\n</function>", []),
    ("closed", "  x", "", "x", []),
    ("closed", "hm</think>x", "", "hm</think>x", []),
    ("closed", "text " + tagged("now"), "", "text ", [("now", "{}")]),
]

# the server fails on these, or answers without their text; here it stays
KEPT = [
    ("free", called("other")),
    ("free", "<tool_call>\nnot json\n</tool_call>"),
    ("free", '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'),
    ("free", '<tool_call>\n{"name": "weather", "arguments": {"place": "Os'),
    ("closed", tagged("other")),
    ("closed", tagged("weather", days="two")),
    ("closed", tagged("weather", exact="True")),
    ("closed", tagged("weather", unknown="7")),
    ("closed", "<tool_call><function=weather></function></tool_call>"),
    ("closed", "<tool_call>\n<function=weather>\n<parameter=place>\nOs"),
]


def parse(thinking, pieces, tools=TOOLS):
    template, _ = THINKING[thinking]
    ending = {"free": "", "open": "<think>\n"}.get(thinking, "<think>\n\n</think>\n\n")
    opening = opening_of("<|im_start|>assistant\n" + ending)
    part = split(pieces, Splitter(opening, tools, template == "qwen35"))
    return part.reasoning, part.content, [(call.name, call.arguments) for call in part.calls]


@pytest.mark.parametrize(("thinking", "reply", "reasoning", "content", "calls"), TABLE)
def test_table(thinking, reply, reasoning, content, calls):
    assert parse(thinking, [reply]) == (reasoning, content, calls)
    assert parse(thinking, list(reply)) == (reasoning, content, calls), "letter by letter"


@pytest.mark.parametrize(("thinking", "reply"), KEPT)
def test_what_is_no_call_is_kept(thinking, reply):
    assert parse(thinking, [reply]) == ("", reply, [])


def test_text_behind_a_call_is_kept():
    assert parse("free", [called("now") + " after"]) == ("", "after", [("now", "{}")])


def test_without_tools_calls_are_content():
    assert parse("free", [called("now")], tools=None) == ("", called("now"), [])
    assert parse("open", ["hm</think>" + tagged("now")], tools=None) == ("hm", tagged("now"), [])


TEXT = st.text(alphabet='ab <>/\n{}"é', max_size=12)
MARKS = st.sampled_from(
    ["<think>", "</think>", "\n\n", called("now"), tagged("now"), tagged("weather", place="x")]
)


@settings(deadline=None, max_examples=150)
@given(
    thinking=st.sampled_from(sorted(THINKING)),
    parts=st.lists(st.one_of(TEXT, MARKS), max_size=5),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_pieces_do_not_matter(thinking, parts, cuts):
    """A stream's deltas join to the whole reply's parts."""
    reply = "".join(parts)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(reply[at : at + cut])
        at += cut
    assert parse(thinking, [*pieces, reply[at:]]) == parse(thinking, [reply])


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """oracle(asks) -> what llama.cpp makes of each {"template", "body", "reply"}."""
    source = ROOT / "build" / "src" / "current" / "vendor" / "llama.cpp"
    if not (source / "common" / "chat.h").exists():
        pytest.skip("build/src/current holds no llama.cpp source; `make dev` unpacks it")
    lib = Path(private.__file__).parent / "lib"
    program = tmp_path_factory.mktemp("oracle") / "chat_oracle"
    folders = [source / name for name in ("common", "include", "ggml/include", "vendor")]
    includes = [f"-I{folder}" for folder in (*folders, ROOT / "src")]  # patched lines include ours
    libs = [f"-ldraftwood-{name}" for name in ("llama-common", "llama", "ggml", "ggml-base")]
    command = ["c++", "-std=c++17", "-O0", *includes, str(HERE / "chat_oracle.cpp"), "-o", str(program)]
    subprocess.run([*command, f"-L{lib}", *libs, f"-Wl,-rpath,{lib}"], check=True, timeout=280)

    def ask(asks):
        lines = "".join(json.dumps(one) + "\n" for one in asks)
        done = subprocess.run([program], input=lines, capture_output=True, text=True, timeout=280, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return ask


def asked(thinking, reply):
    template, on = THINKING[thinking]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    body["chat_template_kwargs"] = {"enable_thinking": on}
    return {"template": TEMPLATES[template], "body": body, "reply": reply}


@pytest.mark.slow
def test_table_is_llama_cpps(oracle):
    for row, answer in zip(TABLE, oracle([asked(*row[:2]) for row in TABLE]), strict=True):
        message = answer["message"]
        calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
        assert (message["reasoning_content"], message["content"], calls) == row[2:], row


@pytest.mark.slow
def test_what_is_kept_llama_cpp_does_not_answer_whole(oracle):
    """If this fails, the pinned parser has become better than ours: move the row to TABLE."""
    for (thinking, reply), answer in zip(KEPT, oracle([asked(*row) for row in KEPT]), strict=True):
        assert answer.get("message", {}).get("content") != reply, (thinking, reply)
