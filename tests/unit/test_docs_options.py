"""docs/options.md: the table is that of the code, each option has prose, llama-server knows its flags.

docs/serving.md: limits of the server's clients are those of the headers.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import draftwood
import options_table
import pytest
from draftwood.cli import serve

SERVER = options_table.ROOT / "src" / "server"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    copy = tmp_path / "options.md"
    copy.write_text(options_table.PAGE.read_text("utf-8"), "utf-8")
    return copy


def test_the_page_is_that_of_the_code(capsys):
    assert options_table.main([]) == 0, capsys.readouterr().out


def test_the_docstring_names_each_argument():
    documented = draftwood.Llama.__doc__ or ""
    known = {"draft_model"}  # upstream's own, here with another effect
    assert [name for name in options_table.arguments() if name not in documented and name not in known] == []


def test_a_stale_table_is_found_and_written(page, capsys):
    text = page.read_text("utf-8")
    page.write_text(text.replace("| 512 MiB |", "| 256 MiB |"), "utf-8")
    assert options_table.main([str(page)]) == 1
    assert "the table is stale" in capsys.readouterr().out
    assert options_table.main(["--write", str(page)]) == 0
    assert page.read_text("utf-8") == text


def test_an_option_without_prose_is_found(page, capsys):
    text = page.read_text("utf-8")
    page.write_text(re.sub(r"^\| `draft_vocab` \| number.*\n", "", text, flags=re.M), "utf-8")
    assert options_table.main([str(page)]) == 1
    assert "draft_vocab: found 0 rows of prose" in capsys.readouterr().out


def test_prose_of_no_option_is_found(page, capsys):
    page.write_text(page.read_text("utf-8") + "| `draft_width` | none | none | never |\n", "utf-8")
    assert options_table.main([str(page)]) == 1
    assert "draft_width: found 1 rows of prose; expected 0" in capsys.readouterr().out


def test_a_new_argument_needs_its_default_in_words(monkeypatch):
    monkeypatch.delitem(options_table.NONE, "vram")
    monkeypatch.setitem(options_table.NONE, "exact", "on")
    found = [
        each for each in options_table.faults(options_table.PAGE.read_text("utf-8")) if "default" in each
    ]
    assert [each.partition(":")[0] for each in found] == ["exact", "vram"]


def test_a_flag_that_serve_refuses_is_none_of_its(monkeypatch):
    assert "`--vram`" not in options_table.served("vram", "")
    monkeypatch.setitem(serve._OTHERWISE, "--rpc", "leave it out")
    assert options_table.served("rpc_servers", "`--rpc`") == ""


def test_llama_server_knows_its_flags():
    shown = subprocess.run(
        [serve.program("llama-server"), "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown.stdout)) | {"--speculation", "--vram"}
    cells = [options_table.served(name, options_table.flags(name)[0]) for name in options_table.arguments()]
    spelled = set(re.findall(r"`(.+?)`", " ".join(cells)))
    assert {"-md", "--rpc"} <= spelled <= known


def limits() -> str:
    """What docs/serving.md says of limits."""
    page = (options_table.ROOT / "docs" / "serving.md").read_text("utf-8")
    return page.partition("## Limits")[2].partition("\n## ")[0]


def test_limits_of_clients_are_those_of_the_header():
    header = (SERVER / "http_limits.h").read_text("utf-8")
    flags = (SERVER / "options.h").read_text("utf-8")
    defaults = dict(re.findall(r"^    \w+ +(\w+) += (.+?);", header, re.M))
    added = re.findall(r'add\("(--http-[\w-]+)", "(\w+)".*?take_limit<&limits::(\w+), (\d+)>', flags, re.S)
    assert sorted(field for _, _, field, _ in added) == sorted(defaults)
    said = re.findall(r"^\| `(--http-\S+) (\w+)` \| (\S+) \| (\S+) \| [^|]+ \| [^|]+ \|$", limits(), re.M)
    assert said == [(flag, unit, defaults[field], least) for flag, unit, field, least in added]


def test_limits_of_what_is_parsed_are_those_of_the_header():
    words = {
        "most_json_depth": "{:,} levels",
        "most_references": "{:,} `$ref`",
        "most_groups": "{:,} groups in each other, ",
        "most_rules": "{:,} rules",
        "most_prompts": "| prompts of a request, documents of a rerank | {:,} |",
        "most_grammar": "| {} MiB",
        "most_repetitions": "repetitions of {} million elements",
        "most_trigger": "triggers of {:,} bytes",
    }
    header = (SERVER / "input_size.h").read_text("utf-8")
    found = dict(re.findall(r"^constexpr \w+ +(most_\w+) += (\d+)", header, re.M))  # of "4u << 20": MiB
    assert sorted(found) == sorted(words)
    assert [name for name in words if words[name].format(int(found[name])) not in limits()] == []
    assert f"| {int(found['most_groups']) // 2:,} groups in each other |" in limits()
