"""Prompts through one model, for `draftwood run` and `tree`: loads, generates, measures. Prints nothing.

Imports the library, so it is imported only when a model is to be run.
Test: tests/model/test_cli.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftwood._llama_cpp import llama_cpp as _native
from draftwood._llama_cpp.llama_chat_format import Jinja2ChatFormatter
from draftwood.cli.progress import Bar, Interrupt
from draftwood.engine.tree import Tree
from draftwood.errors import ContextFullError, UnsupportedError, no_tokens
from draftwood.llama import Llama
from draftwood.stats import ExpertStats, SpeculationStats

Finish = Literal["stop", "length", "context", "interrupt"]

_TEMPLATE = "tokenizer.chat_template"


@dataclass(slots=True)
class Report:
    """What a run came to. Times in seconds; `seconds` is without the prompt's."""

    tokens: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_evaluated: int = 0
    """Tokens of the prompt that were evaluated; the others were kept from the prompt before."""
    prompt_seconds: float = 0.0
    finish: Finish = "stop"
    """stop: the model ended its text; length: max_tokens; context: no room; interrupt: Ctrl-C."""
    speculation: str = "off"
    speculation_reason: str = ""
    chains_because: str = ""
    """Why drafts are chains although trees were asked for."""
    stats: SpeculationStats | None = None
    experts: ExpertStats | None = None
    """Of the pool since the model was loaded; None without one."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated a second, the prompt's time left out."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """What a round drafted and what came of it."""

    tree: Tree
    """What was verified; its root is the newest token before the round."""
    rows: int
    """Rows of the verify, nodes and padding."""
    emitted: list[int]
    """Tokens sampled: accepted ones, then the bonus token unless the text ended before it."""

    @property
    def accepted(self) -> list[int]:
        """Nodes that the samples went through, the root left out."""
        return self.tree.walk(self.emitted)[1:]

    @property
    def bonus(self) -> int | None:
        """The token that the target gave where no node had it."""
        return self.emitted[-1] if len(self.emitted) > len(self.accepted) else None


class Session(Llama):
    """A `Llama` that shows how far loading and the prompt have come, and lets Ctrl-C end both."""

    def __init__(self, model_path: str, interrupt: Interrupt, **kwargs: Any) -> None:
        self.interrupt = interrupt
        self._in_prompt = False
        self._evaluated = 0
        self._bars = not kwargs.get("verbose")  # llama.cpp's log would tear them apart
        self._bar: Bar | None = None
        self._on_load = _native.llama_progress_callback(self._loading)
        self.prompt_seconds = 0.0
        with Bar("loading", wanted=self._bars) as self._bar:
            try:
                super().__init__(model_path, **kwargs)
            finally:
                self._bar = None
                interrupt.check()  # also where the load failed because we ended it

    @property
    def model_params(self) -> Any:
        """The `llama_model_params` the model was loaded with."""
        return super().model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.progress_callback = self._on_load
        super(Session, type(self)).model_params.fset(self, params)  # type: ignore[attr-defined]

    def _loading(self, fraction: float, _user: Any) -> bool:
        if self._bar is not None:
            self._bar.update(fraction)
        return not self.interrupt.raised

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate `tokens`; a prompt goes a batch at a time, which is where `Llama.eval` cuts it too."""
        if self.n_tokens > 0 and not self._in_prompt:
            super().eval(tokens)
            return
        self._evaluated += len(tokens)
        began = time.perf_counter()
        with Bar("prompt", wanted=self._bars) as bar:
            for start in range(0, len(tokens), self.n_batch):
                self.interrupt.check()
                super().eval(tokens[start : start + self.n_batch])
                bar.update(min(1.0, (start + self.n_batch) / len(tokens)))
        self.prompt_seconds += time.perf_counter() - began

    @property
    def from_draft(self) -> bool:
        """Whether the token that `generate` yielded last was a draft token that the target confirmed.

        It was exactly if its round goes on after it.
        """
        return self._engine is not None and self._engine.row() is not None

    @property
    def chains_because(self) -> str:
        """Why drafts are chains although trees were asked for; empty where they are trees."""
        asked = self._options.speculation == "tree" or self._options.tree_budget is not None
        return self.tree_refusal if asked else ""

    def encode_prompt(self, prompt: str, chat: bool | None) -> tuple[list[int], bool]:
        """Return the prompt's tokens and whether they went through the model's chat template.

        `chat` None takes the template if the model has one.
        Errors: UnsupportedError when a template was asked for and there is none; OptionError for no tokens.
        """
        if chat:
            self._require_template("--chat", "--raw continues the prompt as it stands")
        if _TEMPLATE in self.metadata and chat is not False:
            return self.encode_chat([{"role": "user", "content": prompt}]), True
        return self._tokens(prompt, add_bos=True), False

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation whose next message is the model's.

        Errors: UnsupportedError if the model has no chat template.
        """
        template = self._require_template("a chat", 'draftwood run MODEL "Once upon a time" continues a text')
        return self._tokens(self._through_template(template, messages), add_bos=False)

    def _require_template(self, needed_by: str, hint: str) -> str:
        template: str | None = self.metadata.get(_TEMPLATE)
        if template is None:
            raise UnsupportedError(
                f"found no chat template in the model ({_TEMPLATE} is not in its metadata); "
                f"{needed_by} needs one",
                hint=hint,
            )
        return template

    def _tokens(self, text: str, *, add_bos: bool) -> list[int]:
        tokens: list[int] = self.tokenize(text.encode("utf-8"), add_bos=add_bos, special=True)
        if not tokens:
            raise no_tokens('draftwood run MODEL "a text"')
        return tokens

    def _through_template(self, template: str, messages: list[dict[str, str]]) -> str:
        special = {
            name: self._model.token_get_text(token) if token != -1 else ""
            for name, token in (("eos_token", self.token_eos()), ("bos_token", self.token_bos()))
        }
        formatter: Any = Jinja2ChatFormatter(template=template, **special)
        text: str = formatter(messages=messages).prompt
        return text

    def run(
        self, prompt: list[int], max_tokens: int, emit: Callable[[bytes, bool], None], **sampling: Any
    ) -> Report:
        """Generate after `prompt` and hand each token's bytes to `emit`, with whether it came from the draft.

        Ends at the model's end token, after `max_tokens` (0 or less: no limit), at the end of the context or
        at Ctrl-C. Errors: ContextFullError if the prompt leaves no room; what `generate` and `emit` raise.
        """
        room = self._room(prompt, max_tokens)
        limit = min(max_tokens, room) if max_tokens > 0 else room
        report = Report(
            prompt_tokens=len(prompt),
            finish="length" if limit == max_tokens else "context",
            speculation=self.speculation,
            speculation_reason=self.speculation_reason,
            chains_because=self.chains_because,
        )
        before, self._evaluated, self._in_prompt = self.prompt_seconds, 0, True
        began = time.perf_counter()
        tokens = self.generate(prompt, **sampling)
        try:
            for token in tokens:
                self._in_prompt = False
                if self._ends(token):
                    report.finish = "stop"
                    break
                report.tokens += 1
                emit(self.detokenize([token]), self.from_draft)
                if report.tokens == limit:
                    break
                self.interrupt.check()
        except KeyboardInterrupt:
            report.finish = "interrupt"
        finally:
            self._in_prompt = False
            tokens.close()
        report.prompt_evaluated = self._evaluated
        report.prompt_seconds = self.prompt_seconds - before
        report.seconds = time.perf_counter() - began - report.prompt_seconds
        report.stats = self.speculation_stats
        report.experts = self.expert_stats
        return report

    def rounds(self, prompt: list[int], n: int, **sampling: Any) -> Iterator[Round]:
        """Yield up to `n` rounds after `prompt`, of which the first token belongs to none.

        Fewer where the text or the context ends. The text is that of `generate`, which makes the rounds.
        Errors: ContextFullError if the prompt leaves no room; KeyboardInterrupt; what `generate` raises.
        """
        self._room(prompt, 0)
        engine, stats = self._engine, self.speculation_stats
        assert engine is not None
        assert stats is not None
        tokens = self.generate(prompt, **sampling)
        try:
            newest = next(tokens)
            for _ in range(n):
                if self._ends(newest) or self.n_tokens >= self.n_ctx():
                    return
                emitted = [newest := next(tokens)]
                while engine.row() is not None and not self._ends(newest):
                    emitted.append(newest := next(tokens))
                before, stats = stats, engine.stats()
                tree = engine.tree()
                yield Round(tree, len(tree) + stats.padding - before.padding, emitted)
                self.interrupt.check()
        finally:
            tokens.close()

    def _ends(self, token: int) -> bool:
        return bool(_native.llama_vocab_is_eog(self._model.vocab, token))

    def _room(self, prompt: list[int], max_tokens: int) -> int:
        """Return how many tokens fit after the prompt. Errors: ContextFullError for none."""
        room: int = self.n_ctx() - len(prompt)
        if room < 1:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, the context {self.n_ctx()}; expected room for another",
                hint=f"--n-ctx {len(prompt) + max(max_tokens, 256)}",
            )
        return room
