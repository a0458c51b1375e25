"""The page of `draftwood serve` in a headless Chromium: on a real server, and on streams made up here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.processes import ready, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: pip install '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
SHOTS = ROOT / "build" / "web"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEY = "secret"
NO_COLOUR = "rgba(0, 0, 0, 0)"
PATIENCE = 60_000  # milliseconds: a loaded machine may take long
expect = playwright.expect
expect.set_options(timeout=PATIENCE)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        made = engine.chromium.launch(executable_path=CHROMIUM, timeout=3 * PATIENCE)
        yield made
        made.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # mtp: "auto" would draft as far as it pays on this machine now
    flags = ("--speculation", "mtp")
    with serving(str(MODEL), *flags, n_ctx=16384, stderr=subprocess.DEVNULL) as (found, process):
        ready(found, process)
        yield found


@pytest.fixture
def show(browser) -> Iterator[Callable[..., Any]]:
    """show(address) -> the page, with nothing stored, no fault of its script and no request to elsewhere."""
    faults: list[str] = []
    pages = []

    def make(address: str, until: str = "tiny-moe-f16", **settings: Any) -> Any:
        page = browser.new_page(**settings)
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(address) or faults.append(asked.url))
        page.goto(f"{address}/")
        expect(page.locator("#model")).to_have_text(until)
        pages.append(page)
        return page

    yield make
    for page in pages:
        page.close()
    assert faults == []


def set_fields(page: Any, **fields: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Done").click()


def say(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def replied(page: Any, count: int = 1) -> Any:
    """Wait for the end of so many replies; return the last."""
    expect(page.locator(".reply:not(.busy)")).to_have_count(count)
    return page.locator(".reply").nth(count - 1)


def event(text: str | None = None, **fields: Any) -> str:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": "stop" if text is None else None}
    return f"data: {json.dumps({'choices': [choice], **fields})}\n\n"


def timings(tokens: int, drafted: int, accepted: int) -> dict[str, Any]:
    drafts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    times = {"predicted_n": tokens, "predicted_per_second": 50.0, "prompt_n": 5, "cache_n": 0, **drafts}
    return {"timings": times}


DONE = "data: [DONE]\n\n"


def answers(page: Any, *bodies: str, status: int = 200) -> list[dict[str, Any]]:
    """Let the page's next requests be answered with these bodies; return a list that gets the requests."""
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, content_type=kind, body=bodies[min(len(asked), len(bodies)) - 1])

    page.route("**/v1/chat/completions", answer)
    return asked


# ---- on a server ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chat_with_marks_and_figures(show, address, scheme):
    page = show(address, color_scheme=scheme, viewport={"width": 1100, "height": 820})
    expect(page.locator("#facts")).to_have_text("11.5M parameters · F16 · 4,096 tokens of context")
    assert checked(page) == []
    set_fields(page, Temperature="0", Longest_reply="120")
    page.get_by_label("Mark accepted drafts").check()
    say(page, "def main(argv=None):\n    parser = ")
    reply = replied(page)
    say(page, "import os")
    assert len(replied(page, 2).locator(".text").inner_text()) > 20
    note = reply.locator(".note").inner_text()
    found = re.search(r"Cut off .* 120 tokens · [\d.]+ tok/s · (\d+)% of (\d+) drafts accepted", note)
    assert found, note
    assert reply.locator(".drafted").count() > 3
    assert "%" in page.locator("#figures").inner_text()
    assert page.locator(".drafted").first.evaluate("it => getComputedStyle(it).backgroundColor") != NO_COLOUR
    assert checked(page) == []
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{scheme}.png")
    page.get_by_label("Mark accepted drafts").uncheck()
    assert page.locator(".drafted").first.evaluate("it => getComputedStyle(it).backgroundColor") == NO_COLOUR


def checked(page: Any) -> list[str]:
    """Return what axe finds against the accessibility guidelines."""
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found]


def test_the_text_is_that_of_the_server(show, address):
    page = show(address)
    set_fields(page, Temperature="0", Longest_reply="60", Seed="3")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "def f(")
    reply = replied(page)
    body = {**asked.value.post_data_json, "stream": False}
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 60, 3)
    for name in ("stream_options", "return_progress"):
        del body[name]
    expected = page.request.post(f"{address}/v1/chat/completions", data=body).json()
    content = expected["choices"][0]["message"]["content"]
    assert reply.locator(".text").evaluate("it => it.textContent") == content
    assert len(content) > 50


def never_ends(route: Any) -> None:
    """Send the request on; the model may not end its reply."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def throttle(page: Any, rate: int) -> None:
    """Let the page receive so many bytes a second, so that a reply outlasts a busy machine's delays."""
    client = page.context.new_cdp_session(page)
    limits = {"offline": False, "latency": 0, "downloadThroughput": rate, "uploadThroughput": -1}
    client.send("Network.enable")
    client.send("Network.emulateNetworkConditions", limits)


def sent(reply: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream that has ended."""
    lines = reply.text().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# each state of the figures, as [number of replies that are being written, length of the last one, figures]
WATCH = """() => {
  window.shown = [];
  const figures = document.querySelector("#figures");
  const row = it => `${it.querySelector("dd").textContent} ${it.querySelector("dt").textContent}`;
  new MutationObserver(() => shown.push([
    document.querySelectorAll(".reply.busy").length,
    document.querySelector(".reply:last-of-type .text").textContent.length,
    [...figures.children].map(row),
  ])).observe(figures, { childList: true, characterData: true, subtree: true });
}"""


def as_figures(timings: dict[str, Any]) -> list[str]:
    speed, drafted = timings["predicted_per_second"], timings["draft_n"]
    share = int(100 * timings["draft_n_accepted"] / drafted + 0.5)
    return [f"{speed:.{0 if speed >= 100 else 1}f} tok/s", f"{share}% of drafts accepted"]


def test_figures_are_shown_while_a_reply_is_written(show, address):
    page = show(address)
    page.route("**/v1/chat/completions", never_ends)
    throttle(page, rate=20_000)
    set_fields(page, Longest_reply="150", Temperature="0")
    page.evaluate(WATCH)
    with page.expect_response("**/v1/chat/completions") as asked:
        say(page, "def f(")
    length = len(replied(page).locator(".text").evaluate("it => it.textContent"))
    shown = page.evaluate("shown")
    assert {busy for busy, _, _ in shown} == {1}
    early = [rows for _, written, rows in shown if written < length / 2]
    assert [rows[1] for rows in early if rows[1].endswith("drafts accepted")]
    times = [chunk["timings"] for chunk in sent(asked.value) if chunk.get("timings", {}).get("draft_n")]
    figures = [rows[:2] for _, _, rows in shown if rows[1].endswith("drafts accepted")]
    said = list(map(as_figures, times))
    assert [each for each in figures if each not in said] == []
    assert figures[-1] == said[-1]
    assert len({speed for speed, _ in figures}) > 10
    assert len({share for _, share in figures}) > 3


# the text of a reply in parts, each with whether it is marked
PARTS = """it => {
  const parts = [], walk = document.createTreeWalker(it, NodeFilter.SHOW_TEXT);
  while (walk.nextNode())
    parts.push([walk.currentNode.data, walk.currentNode.parentElement.closest(".drafted") !== null]);
  return parts;
}"""


def marked(parts: list[tuple[str, bool]], contents: list[str]) -> list[bool]:
    """Return which tokens of a text are marked."""
    marks = [is_marked for text, is_marked in parts for _ in text]
    found = []
    for content in contents:
        here, marks = marks[: len(content)], marks[len(content) :]
        assert len(set(here)) == 1
        found.append(here[0])
    assert marks == []
    return found


@pytest.mark.parametrize("kind", ["mtp", "draft-mtp"])
def test_as_many_tokens_are_marked_as_the_server_accepted(show, kind):
    server = serving(str(MODEL), "--spec-type", kind, n_ctx=2048, stderr=subprocess.DEVNULL)
    with server as (address, process):
        ready(address, process)
        page = show(address)
        page.route("**/v1/chat/completions", never_ends)
        set_fields(page, Longest_reply="150", Temperature="0")
        with page.expect_response("**/v1/chat/completions") as asked:
            say(page, "def main(argv=None):\n    parser = ")
        reply = replied(page)
        chunks = sent(asked.value)
        last = chunks[-1]["timings"]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        contents = [delta["content"] for delta in deltas if delta.get("content")]
        assert len(contents) == last["predicted_n"] == 150  # a token each
        marks = marked(reply.locator(".text").evaluate(PARTS), contents)
        assert sum(marks) == last["draft_n_accepted"] > 10
        found = re.search(r"(\d+%) of (\d+) drafts", reply.locator(".note").inner_text())
        assert found is not None
        assert [f"{found[1]} of drafts accepted", int(found[2])] == [as_figures(last)[1], last["draft_n"]]


def test_escape_and_stop_end_a_reply(show, address):
    page = show(address)
    page.route("**/v1/chat/completions", never_ends)
    throttle(page, rate=20_000)
    set_fields(page, Longest_reply="3500", Temperature="0")
    for count, stop in enumerate(
        (lambda: page.keyboard.press("Escape"), lambda: page.locator("#send").click()), 1
    ):
        say(page, "def f(")
        expect(page.locator(".reply.busy .text")).not_to_be_empty()
        expect(page.locator("#send")).to_have_text("Stop")
        stop()
        assert replied(page, count).locator(".note").inner_text().startswith("Stopped")
        expect(page.locator("#send")).to_have_text("Send")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".reply")).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()


def test_settings_stay_and_the_keyboard_is_enough(show, address):
    page = show(address)
    page.keyboard.type("hi")
    page.keyboard.press("Shift+Enter")
    assert page.get_by_label("Message").input_value() == "hi\n"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.get_by_label("System prompt").fill("Be brief.")
    page.keyboard.press("Escape")
    page.reload()
    asked = answers(page, event("x") + event() + DONE)
    say(page, "hello")
    replied(page)
    say(page, "again")
    replied(page, 2)
    roles = [(message["role"], message["content"]) for message in asked[1]["messages"]]
    assert roles == [("system", "Be brief."), ("user", "hello"), ("assistant", "x"), ("user", "again")]
    assert "temperature" not in asked[1]


def test_a_server_with_a_key_and_then_without_life(show):
    with serving(str(MODEL), "--api-key", KEY, n_ctx=2048, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        page = show(address, until="")
        for key in ("wrong", KEY):
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Continue").click()
            if key == "wrong":
                expect(page.locator("#key-why")).to_have_text("The server refused this key.")
        expect(page.locator("#model")).to_have_text("tiny-moe-f16")
        set_fields(page, Longest_reply="5")
        say(page, "hi")
        assert "5 tokens" in replied(page).locator(".note").inner_text()
        process.kill()
        process.wait()
        say(page, "still there?")
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
        expect(page.locator("#state")).to_have_text("No answer from the server")


# ---- on streams made up here ----


def test_a_token_is_marked_where_it_was_drafted_and_accepted(show, address):
    page = show(address)
    rounds = [
        event("a ", **timings(1, 0, 0)),
        event("b ", **timings(2, 3, 2)),
        event("c ", **timings(3, 3, 2)),
        event("d ", **timings(4, 3, 2)),  # the target's own token ends the round
        event("e ", **timings(5, 6, 2)),  # a round without a right draft
        event("fg ", **timings(7, 9, 5)),  # two tokens in a chunk
        event("h ", **timings(8, 9, 5)),
        event("i ", **timings(9, 9, 5)),
        event(),
    ]
    answers(page, "".join([*rounds, DONE]))
    say(page, "x")
    reply = replied(page)
    assert "".join(reply.locator(".drafted").all_text_contents()) == "b c fg h "
    assert "56% of 9 drafts" in reply.locator(".note").inner_text()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_fenced_code_is_set_apart(show, address, size):
    page = show(address)
    text = "So:\n```python\nx = '``'\n\n``y\n```\nand `z`\n```\nlast\n```"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answers(page, "".join([*map(event, pieces), event(), DONE]))
    say(page, "x")
    into = replied(page).locator(".text")
    assert into.locator("pre").all_text_contents() == ["x = '``'\n\n``y\n", "last\n"]
    assert into.evaluate("it => it.textContent") == "So:\nx = '``'\n\n``y\nand `z`\nlast\n"


def test_text_is_never_markup(show, address):
    page = show(address)
    text = "<img src=x onerror=alert(1)><b>&amp;"
    answers(page, event(text) + event() + DONE)
    say(page, text)
    assert replied(page).locator(".text").inner_text() == text
    assert page.locator(".user").inner_text() == text


def test_thoughts_are_folded(show, address):
    page = show(address)
    thought = {"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}
    answers(page, f"data: {json.dumps({'choices': [thought]})}\n\n" + event("yes") + event() + DONE)
    say(page, "x")
    reply = replied(page)
    expect(reply.get_by_text("hm")).to_be_hidden()
    reply.get_by_text("Thoughts").click()
    expect(reply.get_by_text("hm")).to_be_visible()
    assert reply.locator("> .text").inner_text() == "yes"


FULL = json.dumps({"error": {"message": "the request exceeds the available context size", "code": 400}})


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (FULL, 400, "the request exceeds the available context size"),
        ("<html>", 502, "The server answered 502"),
        (event("a") + f"data: {FULL}\n\n", 200, "the request exceeds the available context size"),
        (event("a"), 200, "The connection ended before the reply did."),
    ],
)
def test_errors_are_said_and_can_be_tried_again(show, address, body, status, words):
    page = show(address)
    answers(page, body, status=status)
    say(page, "x")
    expect(page.get_by_role("alert")).to_contain_text(words)
    page.unroute("**/v1/chat/completions")
    asked = answers(page, event("right") + event() + DONE)
    page.get_by_role("button", name="Try again").click()
    assert replied(page).locator(".text").inner_text() == "right"
    assert asked[0]["messages"] == [{"role": "user", "content": "x"}]


def test_a_model_that_loads_is_waited_for(address, browser):
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    loading = json.dumps({"error": {"message": "Loading model", "code": 503}})
    page.route("**/props", lambda route: route.fulfill(status=503, body=loading))
    page.goto(f"{address}/")
    expect(page.locator("#state")).to_have_text("Loading the model…")
    page.unroute("**/props")
    expect(page.locator("#model")).to_have_text("tiny-moe-f16")
    expect(page.locator("#state")).to_be_empty()
    page.close()
