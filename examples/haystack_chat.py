"""Chat with a GGUF model through Haystack's LlamaCppChatGenerator: whole, streamed, and a forced tool.

python examples/haystack_chat.py MODEL.gguf "What is a lighthouse?"
"""

import json
import sys
from typing import Annotated

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

from haystack.dataclasses import ChatMessage  # noqa: E402
from haystack.tools import tool  # noqa: E402
from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator  # noqa: E402


@tool
def weather(place: Annotated[str, "the place"]) -> str:
    """Tell the weather of a place."""
    return f"It rains in {place}."


def main(model: str, question: str) -> None:
    """Ask the question in three ways."""
    generator = LlamaCppChatGenerator(
        model,
        n_ctx=1024,
        n_batch=512,
        model_kwargs={"speculation": "auto", "verbose": False},  # arguments of draftwood.Llama
        generation_kwargs={"temperature": 0.0, "max_tokens": 48},
    )
    generator.warm_up()
    messages = [ChatMessage.from_user(question)]
    whole = generator.run(messages)["replies"][0].text
    print("whole:", json.dumps(whole))

    pieces: list[str] = []
    generator.run(messages, streaming_callback=lambda chunk: pieces.append(chunk.content))
    print(f"stream: {len(pieces)} pieces, {'the same' if ''.join(pieces) == whole else 'another'} text")

    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 200}
    reply = generator.run(messages, tools=[weather], generation_kwargs=forced)["replies"][0]
    print("tool:", [(call.tool_name, call.arguments) for call in reply.tool_calls])

    client = generator._model  # Haystack has no public name for it
    print(f"drafter: {client.speculation}, {client.speculation_stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
