"""Hold a GGUF model's reply to a choice, a pattern and a Pydantic class through outlines.

python examples/outlines_class.py MODEL.gguf "Which tower is the tallest?"
"""

import sys
from typing import Literal

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

import outlines  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402


class Tower(BaseModel):
    """What a reply is held to."""

    name: str = Field(max_length=20)
    tall: bool


def main(model: str, question: str) -> None:
    """Ask the question three times."""
    llm = draftwood.Llama(model, n_ctx=1024, verbose=False)
    ask = outlines.from_llamacpp(llm)
    print("choice:", ask(question, Literal["yes", "no"], temperature=0.0, max_tokens=8))
    print("pattern:", ask(question, outlines.types.Regex(r"[0-9]{3} m"), temperature=0.0, max_tokens=8))
    print("class:", repr(Tower.model_validate_json(ask(question, Tower, temperature=0.0, max_tokens=200))))
    print(f"drafter: {llm.speculation}, {llm.speculation_stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
