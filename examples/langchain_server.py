"""Chat with `draftwood serve` through LangChain's ChatOpenAI: invoke, stream, batch, a Pydantic class.

python examples/langchain_server.py MODEL.gguf "What is a lighthouse?"    (or http://HOST:PORT/v1 of a server)
"""

import json
import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from serving import served


class Tower(BaseModel):
    """What a reply is held to."""

    name: str = Field(max_length=20)
    tall: bool


def main(address: str, question: str) -> None:
    """Ask the question in four ways."""
    chat = ChatOpenAI(base_url=address, api_key="none", model="local", temperature=0.0, max_tokens=96)
    whole = chat.invoke(question).content
    print("invoke:", json.dumps(whole))
    streamed = "".join(chunk.text for chunk in chat.stream(question))
    print(f"stream: {'the same' if streamed == whole else 'another'} text")
    batch = chat.batch([question, "def fibonacci(n):", question])
    print(f"batch: {len(batch)} replies, {len({reply.content for reply in batch})} texts")
    print("class:", repr(chat.with_structured_output(Tower, method="json_schema").invoke(question)))


if __name__ == "__main__":
    with served(sys.argv[1]) as url:
        main(url, sys.argv[2])
