"""The prompt of a completion: checked, as tokens, and what room it leaves. Texts to embed are checked, too.

Tokens are upstream's, BOS, EOS and infill included. Must not know: replies, chat.
Tests: tests/model/test_api_completion.py (against upstream's own), tests/model/test_api_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.api.detokenize import token_text
from draftwood.errors import OptionError, no_tokens
from draftwood.generate.host import Host
from draftwood.warn import warn

_BEGINNING = 32  # characters
_FIM = 0  # upstream's placeholder for the prefix, middle and suffix tokens of infilling


@contextmanager
def encodable_text() -> Iterator[None]:
    """Raise OptionError for text that UTF-8 cannot hold. Python makes some of bytes that it cannot read."""
    try:
        yield
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":  # of a callback that prints
            raise
        raise OptionError(
            f"found text with {error.object[error.start]!r} at character {error.start}, which is no Unicode "
            "character by itself; expected text that UTF-8 has",
            hint='read files and arguments as UTF-8, or pass text.encode(errors="replace").decode()',
        ) from None


def checked_texts(llm: Host, given: Any) -> Any:
    """Return a text to embed, or a list of some. Errors: OptionError for what is none, or has no tokens.

    Upstream writes in front of its batch for a text without tokens, and the process ends later.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)):
        raise OptionError(
            f"found input of type {type(given).__name__}; expected a str or a list of some",
            hint='embed("text") or embed(["one", "two"])',
        )
    for i, text in enumerate(texts):
        of = f"text {i} of {len(texts)}" if len(texts) > 1 else "a text"
        if not isinstance(text, str):
            raise OptionError(
                f"found {of} of type {type(text).__name__}; expected a str",
                hint='embed("text") or embed(["one", "two"])',
            )
        with encodable_text():
            data = text.encode("utf-8")
        # upstream tokenises it again: a beginning with tokens is enough
        if not llm.tokenize(text[:_BEGINNING].encode("utf-8")) and not llm.tokenize(data):
            raise OptionError(
                f"found {of} without tokens, {text[:40]!r}; expected one token at least",
                hint="leave empty texts out: a model without BOS has nothing to embed for them",
            )
    return given


def checked_prompt(prompt: Any) -> str | list[int]:
    """Return the prompt. Errors: OptionError for what is neither text nor tokens."""
    if isinstance(prompt, str):
        return prompt
    is_list = isinstance(prompt, list)
    wrong = [token for token in prompt if not hasattr(token, "__int__")] if is_list else [prompt]
    if wrong:
        found = f"a prompt {'with a part ' if is_list else ''}of type {type(wrong[0]).__name__}"
        raise OptionError(
            f"found {found}; expected a str or a list of token ids",
            hint="one call for each prompt" if is_list else 'llm("text")',
        )
    tokens: list[int] = prompt
    return tokens


def prompt_tokens(llm: Host, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Tokenise a prompt as upstream does, BOS, EOS and infill placeholders included.

    Errors: OptionError for a prompt without tokens.
    """
    vocab, bos = _native.llama_model_get_vocab(llm.model), llm.token_bos()
    sep = _native.llama_vocab_sep(vocab)
    as_given = isinstance(prompt, list) and suffix is None
    head = [] if as_given or bos == -1 or not _native.llama_vocab_get_add_bos(vocab) else [bos]
    tail = (
        []
        if as_given or (sep == -1 and not _native.llama_vocab_get_add_eos(vocab))
        else [sep if sep != -1 else llm.token_eos()]
    )
    body: list[int] = list(prompt) if isinstance(prompt, list) else []
    if isinstance(prompt, str) and prompt:
        body = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=suffix is None)
    if suffix is not None:
        before, after = [_FIM, *body], [_FIM, *_suffix_tokens(llm, suffix)]
        body = [*after, *before, _FIM] if llm.spm_infill else [*before, *after, _FIM]
    tokens = [*head, *body, *tail]
    if not tokens:
        adds_none = "; this model adds no BOS token" if isinstance(prompt, str) else ""
        raise no_tokens(f"pass some text{adds_none}")
    if tokens[:2] == [bos] * 2:
        warn(
            f'Detected duplicate leading "{token_text(vocab, bos)}" in prompt, this will likely reduce '
            "response quality, consider removing it...",
            RuntimeWarning,
        )
    return tokens


def _suffix_tokens(llm: Host, suffix: str) -> list[int]:
    if not suffix:
        return []
    spaced = llm.metadata.get("tokenizer.ggml.add_space_prefix", "true") == "true"
    # a tokenizer that puts a space in front puts it before the mark, which is then cut off (two tokens)
    text = "☺" + suffix if spaced else suffix
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=False, special=False)
    return tokens[2:] if spaced else tokens


def room_for_reply(llm: Host, request: dict[str, Any], n_prompt: int) -> int:
    """Check the request against the context and return how many tokens it may yield."""
    n_ctx = llm.n_ctx()
    if n_prompt >= n_ctx:
        raise OptionError(
            f"Requested tokens ({n_prompt}) exceed context window of {n_ctx}",
            hint="shorten the prompt, or pass a larger n_ctx to Llama()",
        )
    if request["logprobs"] is not None and llm._logits_all is False:
        raise OptionError(
            "logprobs is not supported for models created with logits_all=False",
            hint="pass logits_all=True to Llama()",
        )
    room = n_ctx - n_prompt
    asked: int | None = request["max_tokens"]
    if asked is not None and not hasattr(asked, "__index__"):
        raise OptionError(
            f"max_tokens is {asked!r:.80}; expected a whole number, or None",
            hint="max_tokens=256; None, 0 and less let the reply go on to the end of the context",
        )
    return room if asked is None or asked <= 0 else min(asked, room)
