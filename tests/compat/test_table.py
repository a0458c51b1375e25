"""The compatibility table: what a llama-cpp-python program may do, and the tests that hold drafting to it.

    make compat-table        (or: python tests/compat/test_table.py [ROW...])

runs the tests of every row and prints row, test, result. As a test, this file checks that the table is whole:
each named test exists, each row of docs/compat.md is here, no row is empty. In a row's tests "on" drafts
(speculation="mtp"), "off" does not, and both must agree.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]

BOOKKEEPING, SAME_TEXT, PROCESSORS, REQUESTS, KEPT, LIFE = (
    f"tests/model/generate/test_{name}.py"
    for name in ("bookkeeping", "same_text", "processors", "requests", "states", "life_cycle")
)
ROWS, CHECKPOINTS = "tests/model/test_api_rows.py", "tests/model/test_checkpoints.py"
COMPLETION, CHAT = "tests/model/test_api_completion.py", "tests/model/test_api_chat.py"
STATES, BAD, PLACEMENT = (f"tests/model/test_api_{name}.py" for name in ("states", "bad_input", "placement"))

TABLE: dict[str, list[str]] = {
    "generator contract": [
        f"{BOOKKEEPING}::test_n_tokens_after_each_yield",
        f"{BOOKKEEPING}::test_break_and_go_on_with_another_prompt",
    ],
    "send": [f"{BOOKKEEPING}::test_send"],
    "reset and prefix reuse": [f"{BOOKKEEPING}::test_chain_of_turns", f"{BOOKKEEPING}::test_without_reset"],
    "a chat's next turn": [
        f"{CHECKPOINTS}::test_a_second_turn_evaluates_new_tokens_only",
        f"{CHECKPOINTS}::test_an_earlier_turn_is_edited",
        f"{CHECKPOINTS}::test_memory_stays_within_its_bound",
    ],
    "draft_model": [
        "tests/model/test_draft_model.py::test_the_same_text",
        "tests/model/test_draft_model.py::test_prompt_lookup",
        "tests/model/test_draft_model.py::test_a_draft_model_that_raises",
    ],
    "eval and sample by hand": [
        f"{BOOKKEEPING}::test_low_level_loop",
        f"{BOOKKEEPING}::test_eval_set_back_by_hand",
    ],
    "sampling": [f"{SAME_TEXT}::test_sampling_is_the_same", f"{SAME_TEXT}::test_draft_lengths"],
    "seeds": [f"{SAME_TEXT}::test_seeds", f"{COMPLETION}::test_generated_completion_is_upstreams"],
    "grammar": [f"{PROCESSORS}::test_grammar", f"{BAD}::test_grammar_that_dead_ends"],
    "JSON schema": [f"{REQUESTS}::test_chat_in_json"],
    "tools": [f"{ROWS}::test_forced_tool", f"{CHAT}::test_reply_is_split"],
    "logits processors": [
        f"{PROCESSORS}::test_processors_and_criteria_see_each_prefix_once",
        f"{PROCESSORS}::test_stateful_processor",
    ],
    "logits processors with logit_bias": [
        f"{REQUESTS}::test_completion_with_bias_and_processor",
        f"{COMPLETION}::test_bias_and_processor_both_run",
    ],
    "min_tokens": [f"{ROWS}::test_min_tokens_and_bias"],
    "stopping criteria": [f"{PROCESSORS}::test_criterion_that_stops"],
    "logprobs": [f"{REQUESTS}::test_logprobs", f"{COMPLETION}::test_completion_is_upstreams"],
    "scores": [f"{SAME_TEXT}::test_scores_are_equal_bit_for_bit"],
    "completion": [f"{REQUESTS}::test_completion", f"{REQUESTS}::test_completion_stops_at_strings"],
    "stream": [
        f"{COMPLETION}::test_generated_completion_is_upstreams",
        f"{COMPLETION}::test_a_stream_that_is_dropped_closes_the_generation",
    ],
    "chat": [f"{REQUESTS}::test_chat", f"{CHAT}::test_without_options_the_result_is_upstreams"],
    "chat template arguments": [
        f"{CHAT}::test_prompts_are_the_servers",
        f"{CHAT}::test_template_arguments_reach_the_template",
    ],
    "end of the context": [
        f"{REQUESTS}::test_end_of_the_context",
        f"{REQUESTS}::test_completion_stops_at_the_context",
    ],
    "save_state, load_state": [
        f"{KEPT}::test_state_saved_and_loaded",
        f"{STATES}::test_state_of_another_model",
    ],
    "RAM and disk caches": [f"{STATES}::test_cache", f"{STATES}::test_cache_folder_that_cannot_be_written"],
    "LoRA": [f"{ROWS}::test_lora"],
    "embeddings": [f"{ROWS}::test_embeddings"],
    "tokenizer override": [
        f"{ROWS}::test_tokenizer_of_the_users_own",
        "tests/model/test_api_detokenize.py::test_long_tokens_are_kept",
    ],
    "multimodal handlers": [
        f"{ROWS}::test_multimodal_handler",
        f"{BOOKKEEPING}::test_positions_that_an_image_skips",
    ],
    "guidance's raw calls on ctx": [
        f"{ROWS}::test_guidance_decodes_behind_our_back",
        f"{ROWS}::test_guidance_cuts_behind_our_back",
        "tests/model/generate/test_raw.py::test_a_cut_in_the_middle_leaves_what_a_fresh_context_has",
    ],
    "pickle": [f"{LIFE}::test_pickle", f"{PLACEMENT}::test_pickle_keeps_them"],
    "close": [f"{LIFE}::test_closing_twice", f"{LIFE}::test_use_after_close"],
    "LangChain's arguments": [f"{PLACEMENT}::test_langchains_arguments_are_corrected"],
}


def documented() -> list[str]:
    """Rows of the first table of docs/compat.md."""
    lines = (ROOT / "docs" / "compat.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index("| row | with drafting |") + 2 :]
    return [
        line.split("|")[1].strip() for line in table[: next(i for i, line in enumerate(table) if not line)]
    ]


def defined(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", TABLE)
def test_every_row_has_tests_that_exist(row):
    assert TABLE[row]
    for test in TABLE[row]:
        path, _, name = test.partition("::")
        assert name in defined(path), test


def test_every_row_is_documented():
    assert documented() == list(TABLE)


def test_the_report_tells_a_failure():
    """A report that cannot say "failed" proves nothing."""
    failed, skipped = "<failure/></testcase>", "<skipped/></testcase>"
    case = '<testcase classname="tests.a.b" name='
    cases = ElementTree.fromstring(
        f'<s>{case}"test_x[1]"/>{case}"test_x[2]">{failed}{case}"test_y">{skipped}</s>'
    )
    counts = outcomes(cases)
    assert counts == {"tests/a/b.py::test_x": [1, 1, 0], "tests/a/b.py::test_y": [0, 0, 1]}
    assert verdict(counts["tests/a/b.py::test_x"]) == "FAILED 1 of 2"
    assert verdict(counts["tests/a/b.py::test_y"]) == "not run"
    assert verdict(None) == "not run"
    assert verdict([3, 0, 0]) == "passed 3"


def outcomes(report: ElementTree.Element) -> dict[str, list[int]]:
    """{test: [passed, failed, skipped]} of a junit report."""
    counts: dict[str, list[int]] = {}
    for case in report.iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "").partition("[")[0]
        failed = case.find("failure") is not None or case.find("error") is not None
        kind = 1 if failed else 2 if case.find("skipped") is not None else 0
        counts.setdefault(f"{path}::{name}", [0, 0, 0])[kind] += 1
    return counts


def verdict(counts: list[int] | None) -> str:
    passed, failed, _ = counts or [0, 0, 0]
    if failed:
        return f"FAILED {failed} of {passed + failed}"
    return f"passed {passed}" if passed else "not run"


def main(rows: list[str]) -> int:
    """Run the rows' tests, print the table; exit status 1 if a row did not pass whole."""
    chosen = {row: tests for row, tests in TABLE.items() if not rows or row in rows}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = sorted({test for each in chosen.values() for test in each})
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        counts = outcomes(ElementTree.parse(report).getroot())
    bad = 0
    print("| row | test | result |\n|---|---|---|")
    for row, tests in chosen.items():
        for test in tests:
            result = verdict(counts.get(test))
            bad += not result.startswith("passed")
            print(f"| {row} | {test} | {result} |")
    print(f"\n{len(chosen)} rows, {sum(sum(c) for c in counts.values())} tests, {bad} lines not passed")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
