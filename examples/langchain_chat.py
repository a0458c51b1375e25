"""Chat with a GGUF model through LangChain's ChatLlamaCpp: invoke, stream, and a forced tool.

python examples/langchain_chat.py MODEL.gguf "What is a lighthouse?"
"""

import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

# This import gives a DeprecationWarning: the package is no longer maintained. No other one has
# ChatLlamaCpp; maintained ones talk to a server, as in langchain_server.py.
from langchain_community.chat_models import ChatLlamaCpp  # noqa: E402
from langchain_core.messages import HumanMessage, SystemMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402


@tool
def weather(place: str) -> str:
    """Tell the weather of a place."""
    return f"It rains in {place}."


def main(model: str, question: str) -> None:
    """Ask the question in three ways."""
    chat = ChatLlamaCpp(
        model_path=model,
        n_ctx=1024,
        max_tokens=48,
        temperature=0.0,
        verbose=False,
        rope_freq_base=0.0,  # the file's own; LangChain's default is wrong for Qwen3.5
        n_batch=512,
        streaming=False,  # invoke() of a forced tool needs the whole reply
        # what LangChain does not know goes to draftwood.Llama through model_kwargs
        model_kwargs={"speculation": "auto", "chat_template_kwargs": {"enable_thinking": False}},
    )
    messages = [SystemMessage("Answer briefly."), HumanMessage(question)]

    print("invoke:", chat.invoke(messages).content)

    print("stream: ", end="")
    for chunk in chat.stream(messages):
        print(chunk.content, end="", flush=True)
    print()

    # a dict forces the tool with a grammar; ChatLlamaCpp hands a name through, which forces nothing
    forced = chat.bind_tools([weather], tool_choice={"type": "function", "function": {"name": "weather"}})
    reply = forced.invoke([HumanMessage("What is the weather in Oslo?")], max_tokens=200)
    print("tool:", [(call["name"], call["args"]) for call in reply.tool_calls] or reply.invalid_tool_calls)

    stats = chat.client.speculation_stats
    print(f"drafter: {chat.client.speculation}, {stats.tokens_per_round:.2f} tokens a round")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
