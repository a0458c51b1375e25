"""Fill a Pydantic class from a GGUF model's reply through instructor, without a server.

python examples/instructor_class.py MODEL.gguf "Which tower is the tallest?"
"""

import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import instructor
from draftwood import Llama
from pydantic import BaseModel, Field


class Tower(BaseModel):
    """What a reply is held to."""

    name: str = Field(max_length=20)
    tall: bool


def main(model: str, question: str) -> None:
    """Ask with a JSON schema and with a forced tool. A grammar holds both replies to the class."""
    llm = Llama(model, n_ctx=2048, verbose=False)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        create = instructor.patch(create=llm.create_chat_completion_openai_v1, mode=mode)
        tower = create(
            messages=[{"role": "user", "content": question}],
            response_model=Tower,
            temperature=0.0,
            max_tokens=200,
        )
        print(f"{mode.name}: {tower!r}")
    print(f"drafter: {llm.speculation}, {llm.speculation_stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
