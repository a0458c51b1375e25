"""Every rule of the patch queue: a queue that keeps them all passes, and each planted fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from patch_queue import MAX_ADDED, MAX_PATCHES, file_name

from patches import check, main, write_readme
from tests.patches.fake_sdist import HOOK_5, make_root, patch_text, write_patch

NAME = "a-hook-after-line-5.patch"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DRAFTWOOD_SDIST", raising=False)
    root = make_root(tmp_path)
    (root / "src" / "hooks").mkdir(parents=True)
    (root / "src" / "hooks" / "hooks.h").write_text("void dw_hook_known(int n) noexcept;\n")
    return root


def problems(root: Path, fresh_table: bool = True) -> list[str]:
    if fresh_table:
        write_readme(root)
    return check(root)[0]


def diff(path: str, start: int, *lines: str) -> str:
    """Write a one-hunk diff with the counts that its lines give."""
    old, new = (sum(line[0] in marks for line in lines) for marks in (" -", " +"))
    body = "".join(line + "\n" for line in lines)
    return f"--- a/{path}\n+++ b/{path}\n@@ -{start},{old} +{start},{new} @@\n{body}"


def edited(old: str, new: str) -> str:
    """Write the good patch with a part of its diff replaced."""
    return patch_text(diff=HOOK_5.replace(old, new))


def changed(path: str, start: int, *lines: str) -> str:
    """Write the good patch with another hunk, as `diff` makes it."""
    return patch_text(diff=diff(path, start, *lines))


# ---- what passes ----


def test_a_good_queue(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_patch(root, NAME, patch_text())
    assert problems(root) == []
    assert main(["check"], root) == 0
    said = capsys.readouterr().out
    assert "1 of 10 patches, 1 of 150 added lines, 0 of 150 in the server." in said
    assert "no patch calls a hook, so hook names were not checked" in said
    assert said.endswith("patch queue: no problems\n")


def test_an_empty_queue(root: Path) -> None:
    assert problems(root) == []


def test_server_lines_count_apart(root: Path) -> None:
    write_patch(root, NAME, edited("src/a.cpp", "common/arg.cpp"))
    assert problems(root) == []
    assert check(root)[1][-1] == "1 of 10 patches, 0 of 150 added lines, 1 of 150 in the server."


def test_known_hook(root: Path) -> None:
    write_patch(root, NAME, edited("hook_5()", "dw_hook_known(5)"))
    assert problems(root) == []
    assert not any("not checked" in remark for remark in check(root)[1])


# ---- planted faults: one patch ----

SRC = "src/a.cpp"
SPACE_AT_END = "adds white space at the end of a line"
SPACE_ONLY = "hunk 1: changes white space only"
CONTEXT = "expected one on each side (-U1)"
ENUM = "an enum changes; no patch may add or change an enum value"
GAP = (" int line_4;", "+x();", " int line_5;", " int line_6;", " int line_7;", "+y();", " int line_8;")
FAULTS = {
    "no-why": (patch_text(Why=""), "header field `Why:` is missing or empty"),
    "no-class": (patch_text(Class=""), "header field `Class:` is missing or empty"),
    "no-drop": (patch_text(Drop_when=""), "header field `Drop-when:` is missing or empty"),
    "no-checked": (patch_text(Checked_at=""), "header field `Checked-at:` is missing or empty"),
    "no-alternative": (patch_text(Why="because"), "`Why:` does not name the alternative"),
    "other-class": (
        patch_text(Class="feature"),
        "`Class: feature`, expected one of hook, build, backport, fix",
    ),
    "other-pin": (
        patch_text(Checked_at="deadbeef0"),
        "`Checked-at: deadbeef0`, expected the pin `012345678`",
    ),
    "short-pin": (patch_text(Checked_at="0"), "`Checked-at: 0`, expected the pin"),
    "twice": (patch_text(Class="hook\nClass: fix"), "its header holds `Class:` twice"),
    "no-header": ("some words\n---\n" + HOOK_5, "expected `Subject:` at its head, found `some words`"),
    "name": (patch_text("a : another subject"), "expected the name `a-another-subject.patch`"),
    "trailing-space": (edited("5();", "5(); "), SPACE_AT_END),
    "trailing-tab": (edited("5();", "5();\t"), SPACE_AT_END),
    "carriage-return": (edited("5();", "5();\r"), SPACE_AT_END),
    "blank-line": (changed(SRC, 5, " int line_5;", "+", " int line_6;"), SPACE_ONLY),
    "indent": (
        changed(SRC, 5, " int line_5;", "-int line_6;", "+    int line_6;", " int line_7;"),
        SPACE_ONLY,
    ),
    "two-context": (
        changed(SRC, 4, " int line_4;", " int line_5;", "+hook();", " int line_6;"),
        f"has 2 and 1 lines of context, {CONTEXT}",
    ),
    "no-context-after": (
        changed(SRC, 5, " int line_5;", "+hook();"),
        f"has 1 and 0 lines of context, {CONTEXT}",
    ),
    "long-gap": (changed(SRC, 4, *GAP), CONTEXT),
    "new-file": (
        patch_text(diff="--- /dev/null\n+++ b/src/new.cpp\n@@ -0,0 +1 @@\n+int x;\n"),
        "adds a file; a patch may only change lines of existing text files",
    ),
    "file-not-there": (edited("a.cpp", "gone.cpp"), "which the pin does not hold"),
    "enum-value": (changed("src/b.h", 3, "     BLUE,", "+    GREEN,", " };"), ENUM),
    "enum-number": (changed("src/b.h", 2, "     RED,", "-    BLUE,", "+    BLUE = 7,", " };"), ENUM),
    "public-struct": (
        changed("src/b.h", 7, "     int n;", "+    int m;", " };"),
        "`struct llama_fake_params` changes",
    ),
    "public-header": (
        changed(
            "include/llama.h",
            1,
            " int llama_version(void);",
            "+int more(void);",
            " int llama_commit(void);",
        ),
        "is a public header, which no patch may change",
    ),
    "unknown-hook": (
        edited("hook_5()", "dw_hook_unknown(5)"),
        "calls `dw_hook_unknown`, which hooks.h does not declare",
    ),
    "does-not-apply": (edited("line_6", "line_9"), "does not apply: file `src/a.cpp`"),
    "header-noise": (
        patch_text(diff="diff --git a/src/a.cpp b/src/a.cpp\nindex 1234567..89abcde 100644\n" + HOOK_5),
        "re-export differs at line 7: expected `--- a/src/a.cpp`, found `diff --git a/src/a.cpp b/src/a.cpp`",
    ),
    "function-name": (edited("@@ int line_4;", "@@"), "re-export differs at line 9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_patch_is_named(root: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = FAULTS[fault]
    write_patch(root, NAME, text)
    assert main(["check"], root) == 1
    found = capsys.readouterr().err.split("error: ")
    assert any(expected in problem and NAME in problem for problem in found), found


# ---- planted faults: the queue ----


def test_listed_twice(root: Path) -> None:
    write_patch(root, NAME, patch_text())
    (root / "patches" / "series").write_text(f"{NAME}\n{NAME}\n")
    assert problems(root, fresh_table=False) == [f"`{NAME}` is listed 2 times in `series`, expected once"]


def test_listed_but_not_on_disk(root: Path) -> None:
    (root / "patches" / "series").write_text(f"{NAME}\n")
    assert problems(root, fresh_table=False) == [f"`{NAME}` is listed in `series` but is not on disk"]


def test_on_disk_but_not_listed(root: Path) -> None:
    (root / "patches" / NAME).write_text(patch_text())
    assert problems(root) == [f"`{NAME}` is on disk but not listed in `series`"]


def test_stale_table(root: Path) -> None:
    write_patch(root, NAME, patch_text())
    assert problems(root, fresh_table=False) == [
        "the table in patches/README.md is stale (python tools/patches.py stats --readme)"
    ]


def test_too_many_patches(root: Path) -> None:
    for i in range(MAX_PATCHES + 1):
        subject = f"a : hook number {i}"
        body = diff(
            SRC, 5 + i, " int line_5;" if i == 0 else f" hook_{i - 1}();", f"+hook_{i}();", " int line_6;"
        )
        write_patch(
            root,
            file_name(subject),
            patch_text(subject, body.replace("@@\n", f"@@ int line_{min(4 + i, 5)};\n")),
        )
    over = [problem for problem in problems(root) if "re-export" not in problem]
    assert over == [f"over budget: {MAX_PATCHES + 1} patches, at most {MAX_PATCHES}"]


@pytest.mark.parametrize(
    ("path", "where"), [(SRC, "outside the server"), ("common/arg.cpp", "in the server")]
)
def test_too_many_lines(root: Path, path: str, where: str) -> None:
    added = [f"+hook({i});" for i in range(MAX_ADDED + 1)]
    body = diff(path, 5, " int line_5;", *added, " int line_6;").replace("@@\n", "@@ int line_4;\n")
    write_patch(root, NAME, patch_text(diff=body))
    assert problems(root) == [f"over budget: {MAX_ADDED + 1} added lines {where}, at most {MAX_ADDED}"]


def test_missing_hooks_header(root: Path) -> None:
    (root / "src" / "hooks" / "hooks.h").unlink()
    write_patch(root, NAME, edited("hook_5()", "dw_hook_known(5)"))
    assert problems(root) == [f"`{NAME}` calls `dw_hook_known`, which hooks.h does not declare"]


def test_readme_without_markers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "patches" / "README.md").write_text("# Patches\n")
    assert main(["stats", "--readme"], root) == 1
    assert "lacks the markers" in capsys.readouterr().err


def test_help_is_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python tools/patches.py import" in capsys.readouterr().out
