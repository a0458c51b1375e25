"""Several threads on one Llama, as LangChain's batch() has them: whole calls wait, streams end in words."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from draftwood import Llama
from draftwood.errors import UnsupportedError

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
PROMPTS = ["def f(", "The lighthouse", "import os", "1 2 3"] * 2
SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}

# A crash would take pytest with it.
SCRIPT = """
import sys
from tests.model.test_threads import {what}
{what}({speculation!r})
"""


@pytest.mark.parametrize("speculation", ["mtp", "tree", "off"])
@pytest.mark.parametrize("what", ["whole_calls", "streams"])
def test_threads(what, speculation):
    script = SCRIPT.format(what=what, speculation=speculation)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
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
    """A later generation takes the context; the earlier one is told so, and what it gave was right."""
    with closing(Llama(str(TINY), speculation=speculation, **SETTINGS)) as llm:
        prompts = [llm.tokenize(prompt.encode()) for prompt in PROMPTS[:4]]
        expected = [list(islice(llm.generate(prompt, temp=0.0), 200)) for prompt in prompts]

        def stream(i: int) -> tuple[int, bool]:
            found: list[int] = []
            try:
                for token in islice(llm.generate(prompts[i], temp=0.0), 200):
                    found.append(token)
            except UnsupportedError as error:
                if "a later generate() has taken the context" not in error.message:
                    raise
            assert found == expected[i][: len(found)]
            return len(found), len(found) == 200

        with ThreadPoolExecutor(4) as pool:
            ends = list(pool.map(stream, [0, 1, 2, 3]))
        assert any(whole for _, whole in ends)
        assert list(islice(llm.generate(prompts[0], temp=0.0), 200)) == expected[0]
