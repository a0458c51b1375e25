"""Every small synthetic preset loads into the finished product and generates; planted ones draft well."""

import pytest
from synth_gguf import PRESETS, write

pytestmark = pytest.mark.model

SMALL = [name for name in PRESETS if not name.startswith("35b-a3b")]
PROMPT = b"Hello world, the quick brown fox"


@pytest.fixture
def load(tmp_path):
    """Write a preset and open it; what was opened is closed at the end."""
    from draftwood import Llama

    opened = []

    def opener(name, **options):
        path = tmp_path / f"{name}.gguf"
        write(PRESETS[name], path)
        opened.append(Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, **options))
        return opened[-1]

    yield opener
    for llm in opened:
        llm.close()


def generate(llm, count):
    """Return `count` greedy tokens after PROMPT."""
    tokens = llm.generate(llm.tokenize(PROMPT, add_bos=False), temp=0.0)
    return [int(token) for token, _ in zip(tokens, range(count), strict=False)]


@pytest.mark.parametrize("name", SMALL)
def test_preset_loads_and_generates(name, load):
    llm = load(name)
    assert llm.n_vocab() == PRESETS[name].vocab
    assert llm.detokenize(llm.tokenize(PROMPT, add_bos=False)) == PROMPT
    tokens = generate(llm, 8)
    assert all(0 <= token < PRESETS[name].vocab - 3 for token in tokens)  # no special among them
    assert len(set(tokens)) >= 5  # random, yet neither one token nor a short loop


def test_builtin_chat_template_is_used(load):
    llm = load("moe-plain")
    asked = [{"role": "user", "content": "hi"}]
    answer = llm.create_chat_completion(messages=asked, max_tokens=4, temperature=0.0)
    # <|im_start|> user \n h i <|im_end|> \n <|im_start|> assistant \n: specials are one token each
    assert answer["usage"]["prompt_tokens"] == len(
        llm.tokenize(b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_bos=False, special=True)
    )
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", ["planted-moe", "planted-dense"])
def test_planted_models_accept_some_drafts_but_not_all(name, load):
    llm = load(name, speculation="mtp", draft_tokens=3)
    generate(llm, 128)
    stats = llm.speculation_stats
    for depth in range(3):
        assert 0 < stats.accepted_by_depth[depth] < stats.drafted_by_depth[depth]
    assert stats.accepted_by_depth[0] > 0.4 * stats.drafted_by_depth[0]
