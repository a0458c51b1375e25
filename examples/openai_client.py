"""Ask `draftwood serve` through the OpenAI client: stream, n, logprobs, JSON schema, a tool, Responses.

python examples/openai_client.py MODEL.gguf "What is a lighthouse?"    (or http://HOST:PORT/v1 of a server)
"""

import json
import math
import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

from openai import NotFoundError, OpenAI
from serving import served

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
}
TOOL = {
    "name": "weather",
    "description": "Tell the weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def main(address: str, question: str) -> None:
    """Ask the question in six ways."""
    client = OpenAI(base_url=address, api_key="none")
    asked = {"model": "local", "messages": [{"role": "user", "content": question}], "temperature": 0.0}
    create = client.chat.completions.create

    whole = create(**asked, max_tokens=48).choices[0].message.content
    print("whole:", json.dumps(whole))
    chunks = [chunk.choices[0] for chunk in create(**asked, max_tokens=48, stream=True) if chunk.choices]
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    print(f"stream: {'the same' if streamed == whole else 'another'} text, {chunks[-1].finish_reason}")

    several = create(**{**asked, "temperature": 0.8}, max_tokens=16, n=2, seed=1)
    print("n=2:", json.dumps([choice.message.content for choice in several.choices]))

    seen = create(**asked, max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs
    rows = seen.content if seen else []
    print("logprobs:", [(row.token, round(math.exp(row.logprob), 3), len(row.top_logprobs)) for row in rows])

    held = {"type": "json_schema", "json_schema": {"name": "tower", "schema": SCHEMA, "strict": True}}
    print(
        "schema:", json.loads(create(**asked, max_tokens=96, response_format=held).choices[0].message.content)
    )

    tools = [{"type": "function", "function": TOOL}]
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = create(**asked, max_tokens=96, tools=tools, tool_choice=choice).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in reply.tool_calls or []]
    print("tool:", calls or "none; does the model's chat template know tools?")

    try:
        response = client.responses.create(
            model="local", input=question, temperature=0.0, max_output_tokens=48
        )
        print(f"responses: {'the same' if response.output_text == whole else 'another'} text")
    except NotFoundError:
        print("responses: not served here")


if __name__ == "__main__":
    with served(sys.argv[1]) as url:
        main(url, sys.argv[2])
