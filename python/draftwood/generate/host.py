"""What text, requests and saved states need of a `Llama`. Test: tests/model/generate/test_host.py."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from draftwood.stats import SpeculationStats


class Host(Protocol):
    """A `Llama` as the packages below it see it. Names and types are upstream's."""

    verbose: bool
    model_path: str
    metadata: dict[str, str]
    cache: Any
    """A BaseLlamaCache, or None."""
    chat_format: str
    chat_handler: Any
    spm_infill: bool
    input_ids: Any
    """i32[n_ctx]; the first n_tokens are evaluated."""
    scores: Any
    """f32[rows, n_vocab]; row i belongs to position i with logits_all."""
    n_tokens: int
    _logits_all: bool  # upstream has no public name for these two
    _seed: int

    @property
    def ctx(self) -> Any:
        """The `llama_context`. Errors: ClosedError, as of `model`."""

    @property
    def model(self) -> Any:
        """The `llama_model`."""

    @property
    def speculation(self) -> str:
        """What drafts."""

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """Counters of the engine; None without one."""

    def n_ctx(self) -> int:
        """Return the positions that the context has."""

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""

    def token_bos(self) -> int:
        """Return the token that begins a text; -1: none."""

    def token_eos(self) -> int:
        """Return the token that ends a text; -1: none."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the tokens of a text."""

    def generate(self, tokens: Sequence[int], **sampling: Any) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens after the prompt `tokens`."""

    def longest_token_prefix(self, a: Sequence[int], b: Sequence[int]) -> int:
        """Return how many tokens both begin with."""

    def set_seed(self, seed: int) -> None:
        """Set the seed of later requests."""

    def reset(self) -> None:
        """Forget everything that was evaluated."""

    def save_state(self) -> Any:
        """Return a LlamaState."""

    def load_state(self, state: Any) -> None:
        """Go back to a LlamaState."""
