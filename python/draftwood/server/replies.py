"""What goes back: the generations of a request as one reply, or as chunks of one stream.

Must not know: HTTP, models. Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

from typing import Any

Reply = dict[str, Any]


def joined(replies: list[Reply], n: int) -> Reply:
    """Return one reply with all choices. `timings` are there if there was one generation.

    n: choices a prompt; a prompt's tokens count once, as OpenAI counts them.
    """
    if len(replies) == 1:
        return replies[0]
    choices = [{**reply["choices"][0], "index": index} for index, reply in enumerate(replies)]
    usage = added([reply["usage"] for reply in replies], n)
    return {
        **{key: value for key, value in replies[0].items() if key != "timings"},
        "choices": choices,
        "usage": usage,
    }


def added(usages: list[dict[str, int]], n: int) -> dict[str, int]:
    """Return the usage of generations of which every n have one prompt."""
    prompt = sum(usage["prompt_tokens"] for usage in usages[::n])
    reply = sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


class Chunks:
    """Makes the chunks of several generations those of one stream."""

    def __init__(self, *, with_usage: bool) -> None:
        self._with_usage = with_usage
        self._head: Reply = {}
        self._last: Reply = {}

    def of(self, chunk: Reply, index: int) -> Reply:
        """Return a generation's chunk as one of choice `index`."""
        if not self._head:
            self._head = {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}
        self._last = {**chunk["choices"][0], "index": index}
        usage = {"usage": None} if self._with_usage else {}
        return {**chunk, **self._head, "choices": [self._last], **usage}

    def ends(self, count: int) -> list[Reply]:
        """Return the last chunks of the choices, of `count`, that have none: the stream is cut off."""
        index = self._last["index"] + (self._last["finish_reason"] is not None)
        nothing: Reply = {"delta": {}} if "delta" in self._last else {"text": ""}
        end = {**self._last, **nothing, "logprobs": None, "finish_reason": "length"}
        usage = {"usage": None} if self._with_usage else {}
        return [{**self._head, "choices": [{**end, "index": each}], **usage} for each in range(index, count)]

    def usage(self, usages: list[dict[str, int]], n: int) -> Reply:
        """Return the chunk with the usage."""
        return {**self._head, "choices": [], "usage": added(usages, n)}
