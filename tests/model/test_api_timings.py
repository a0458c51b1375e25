"""`timings` of a completion: llama-server's names, this request's own drafts."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculation", ["mtp", "off"])
def test_timings(llama, speculation, stream):
    llm = llama(speculation=speculation)
    totals = {"draft_n": 0, "draft_n_accepted": 0, "rounds": 0}
    for prompt in ("one two three", "other"):
        out = llm.create_completion(prompt, max_tokens=30, temperature=0.0, stream=stream)
        timings = (list(out)[-1] if stream else out)["timings"]
        n = timings["predicted_n"]
        assert 30 <= n <= 33  # as upstream, a few more to end an incomplete character
        if not stream:
            assert n == out["usage"]["completion_tokens"]
        assert timings["cache_n"] == 0
        assert timings["prompt_n"] == len(llm.tokenize(prompt.encode(), add_bos=False))
        assert timings["speculation"] == speculation
        assert 0 < timings["prompt_ms"] < 60e3
        assert 0 < timings["predicted_ms"] < 60e3
        assert timings["predicted_per_second"] * timings["predicted_ms"] == pytest.approx(1e3 * n)
        for name in totals:
            totals[name] += timings[name]
    stats = llm.speculation_stats
    assert totals == {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted, "rounds": stats.rounds}
    assert (totals["draft_n_accepted"] > 5) == (speculation == "mtp")


def test_what_the_context_still_held(llama):
    llm = llama(speculation="off")
    prompt = [5, 6, 7, 8]
    first = llm.create_completion(prompt, max_tokens=1, temperature=0.0)
    second = llm.create_completion(prompt, max_tokens=1, temperature=0.0)
    assert (first["timings"]["prompt_n"], first["timings"]["cache_n"]) == (4, 0)
    assert (second["timings"]["prompt_n"], second["timings"]["cache_n"]) == (0, 4)


def test_upstreams_own_loop(llama):
    out = llama(speculation="off", exact=False).create_completion("one two", max_tokens=5)
    timings, usage = out["timings"], out["usage"]
    assert (timings["draft_n"], timings["speculation"]) == (0, "off")
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_n"] == usage["prompt_tokens"]
