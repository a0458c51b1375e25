"""Compare texts by a GGUF model's embeddings through LangChain's LlamaCppEmbeddings.

python examples/langchain_embeddings.py MODEL.gguf "a lighthouse" "a boat" "a tax form"
"""

import math
import sys

if __name__ == "__main__" and len(sys.argv) < 4:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

# This import gives a DeprecationWarning: the package is no longer maintained. No other one has
# LlamaCppEmbeddings; maintained ones talk to a server, as in langchain_server.py.
from langchain_community.embeddings import LlamaCppEmbeddings  # noqa: E402


def pooled(embedding: list) -> list[float]:
    """Return one vector: a generating model gives a row a token, whose mean stands for the text."""
    rows = embedding if isinstance(embedding[0], list) else [embedding]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def cosine(a: list[float], b: list[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def main(model: str, first: str, others: list[str]) -> None:
    """Print how alike the first text and each of the others are."""
    embeddings = LlamaCppEmbeddings(model_path=model, n_ctx=512, n_batch=512, verbose=False)
    rows = [pooled(embeddings.client.embed(text)) for text in (first, *others)]
    for text, row in zip(others, rows[1:], strict=True):
        print(f"{cosine(rows[0], row):6.3f}  {first} | {text}")
    print("drafter:", embeddings.client.speculation, "-", embeddings.client.speculation_reason)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
