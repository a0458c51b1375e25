"""Run a guidance program on a GGUF model: a choice, text, a pattern, and twice on from the same prefix.

python examples/guidance_program.py MODEL.gguf "What is a lighthouse?"
"""

import json
import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(f"usage: {(__doc__ or '').splitlines()[2]}")

import draftwood

draftwood.install()  # before anything imports llama_cpp; needed only beside an installed llama-cpp-python

from guidance import gen, models, select  # noqa: E402


def main(model: str, question: str) -> None:
    """Ask the question twice, the second time from the prefix that both share."""
    llm = draftwood.Llama(model, n_ctx=1024, logits_all=True, verbose=False)
    asked = models.LlamaCpp(llm, echo=False) + question + "\n"

    text = gen("text", max_tokens=16, temperature=0.0)
    reply = asked + "It is " + select(["tall", "small"], name="size") + " and " + text
    print("choice:", reply["size"])
    print("text:", json.dumps(reply["text"]))
    measured = asked + "It is " + gen("height", regex="[0-9]{2,3}") + " m high."
    print("pattern:", measured["height"])
    again = asked + "It is " + reply["size"] + " and " + text
    print(f"again: {'the same' if again['text'] == reply['text'] else 'another'} text")

    stats = llm.speculation_stats
    print(
        f"went back: {stats.restored} times to a copy of the state; guidance decodes itself, without drafts"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
