"""Complete and chat with a GGUF model through LlamaIndex's LlamaCPP.

python examples/llamaindex_chat.py MODEL.gguf "What is a lighthouse?"
"""

import json
import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.llms.llama_cpp import LlamaCPP  # noqa: E402


def main(model: str, question: str) -> None:
    """Complete the question whole and in pieces, then answer it in a chat."""
    llm = LlamaCPP(
        model_path=model,
        temperature=0.0,
        max_new_tokens=48,
        context_window=1024,
        verbose=False,
        model_kwargs={"speculation": "auto"},  # arguments of draftwood.Llama
    )
    whole = llm.complete(question).text
    print("complete:", json.dumps(whole))
    streamed = "".join(piece.delta for piece in llm.stream_complete(question))
    print(f"stream: {'the same' if streamed == whole else 'another'} text")
    print("chat:", json.dumps(llm.chat([ChatMessage(role="user", content=question)]).message.content))

    client = llm._model  # LlamaIndex has no public name for it
    print(f"drafter: {client.speculation}, {client.speculation_stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
