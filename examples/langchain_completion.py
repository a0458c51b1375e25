"""Complete a text with a GGUF model through LangChain's LlamaCpp: invoke and stream.

python examples/langchain_completion.py MODEL.gguf "def fibonacci(n):"
"""

import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

# This import gives a DeprecationWarning: the package is no longer maintained. No other one has
# LlamaCpp; maintained ones talk to a server, as in langchain_server.py.
from langchain_community.llms import LlamaCpp  # noqa: E402


def main(model: str, prompt: str) -> None:
    """Complete the prompt at once and in pieces, which give the same text."""
    llm = LlamaCpp(
        model_path=model,
        n_ctx=1024,
        max_tokens=48,
        temperature=0.0,
        verbose=False,
        rope_freq_base=0.0,
        n_batch=512,
        model_kwargs={"speculation": "auto", "draft_tokens": 3},
    )
    whole = llm.invoke(prompt)
    pieces = list(llm.stream(prompt))
    print("invoke:", whole)
    print(f"stream: {len(pieces)} pieces, {'the same' if ''.join(pieces) == whole else 'another'} text")
    stats = llm.client.speculation_stats
    print(f"drafter: {llm.client.speculation}, {stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
