"""Requests as OpenAI's clients send them: upstream's, and the fields that upstream refuses or does not know.

Must not know: models, HTTP. Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from draftwood._llama_cpp.server import types

# what `Llama` does not take by these names
_OURS = {"n", "best_of", "logit_bias_type", "user", "min_tokens", "stream_options", "max_completion_tokens"}
# arguments of our `create_chat_completion`; left out, its defaults hold
_OPTIONAL = ("chat_template_kwargs", "reasoning_format", "parse_tool_calls")
_SEEDS = 2**32 - 1  # the next number is llama.cpp's word for a random seed


class StreamOptions(BaseModel):
    """What a stream has besides its chunks."""

    include_usage: bool | None = False


class _Request(BaseModel):
    n: int | None = Field(
        default=1, ge=1, le=128, description="How many choices to generate for each prompt."
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="include_usage: a last chunk with the tokens of the request."
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> Any:
        request: Any = self
        if self.stream_options is not None and not request.stream:
            raise ValueError("found stream_options without a stream; expected stream=true beside it")
        return self

    @property
    def wants_usage(self) -> bool:
        """Tell whether the stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_Request, types.CreateCompletionRequest):  # type: ignore[misc]
    """A completion of one prompt or several, in text or tokens."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        default="", description="The prompt, or a list of them, as text or as tokens."
    )


class ChatRequest(_Request, types.CreateChatCompletionRequest):  # type: ignore[misc]
    """A chat."""

    max_completion_tokens: int | None = Field(default=None, description="OpenAI's newer name of max_tokens.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description='Variables of the chat template, such as {"enable_thinking": false}.'
    )
    reasoning_format: str | None = Field(
        default=None, description='"auto": thoughts go to reasoning_content.'
    )
    parse_tool_calls: bool | None = Field(
        default=None, description="Turn <tool_call> blocks of Qwen models into tool_calls."
    )


def calls_of(body: CompletionRequest | ChatRequest) -> list[dict[str, Any]]:
    """Return the arguments of each generation: the choices of the first prompt, then those of the next.

    The first choice of a prompt has the request's seed, so that it is the only choice of n=1.
    """
    given = body.model_dump(exclude=_OURS)
    if isinstance(body, ChatRequest):
        if body.max_tokens is None:
            given["max_tokens"] = body.max_completion_tokens
        given = {name: value for name, value in given.items() if name not in _OPTIONAL or value is not None}
        prompts: list[dict[str, Any]] = [{}]
    else:
        prompts = [{"prompt": prompt} for prompt in _prompts(body.prompt)]
    seeds = [_seed(body.seed, choice) for choice in range(body.n or 1)]
    return [{**given, **prompt, "seed": seed} for prompt in prompts for seed in seeds]


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt or [""]


def _seed(seed: int | None, choice: int) -> int | None:
    return seed if seed is None or seed < 0 or choice == 0 else (seed + choice) % _SEEDS
