"""Text and requests: completion, chat, streaming, logprobs, replies."""
