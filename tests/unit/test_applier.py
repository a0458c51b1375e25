"""The strict applier: what it accepts it applies exactly, all else it refuses in words."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from applier import PatchError, apply_file, apply_patch, apply_series, parse, read_series, split_lines
from hypothesis import assume, given, settings
from hypothesis import strategies as st

OLD = "".join(f"line {i}\n" for i in range(1, 21))
NEW = OLD.replace("line 5\n", "line 5\nhook();\n").replace("line 15\n", "line fifteen\n")


def make_diff(old: str, new: str, path: str = "src/a.cpp") -> bytes:
    """Write a -U1 diff with the standard library, an implementation that is not ours."""
    pair = ([line.decode() for line in split_lines(text.encode())] for text in (old, new))
    lines = difflib.unified_diff(*pair, f"a/{path}", f"b/{path}", n=1)
    whole = (line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
    return "".join(whole).encode()


def apply(old: str, diff: bytes) -> str:
    (file,) = parse("a.patch", diff).files
    return apply_file("a.patch", file, old.encode()).decode()


def complaint(old: str, diff: bytes) -> str:
    with pytest.raises(PatchError) as error:
        apply(old, diff)
    text = str(error.value)
    assert "\n\nhint: `make patch-import`" in text
    return text


# ---- what fits ----

LINE = st.sampled_from(
    ["", "a", "b", "}", " x", "\ty", "-", "+", "@@ -1 +1 @@", "--- a/x", "\\ no", "c\r", "ä"]
)
TEXT = st.builds(
    lambda lines, end: "\n".join(lines) + end, st.lists(LINE, max_size=12), st.sampled_from(["\n", ""])
)


@settings(derandomize=True, deadline=None)
@given(old=TEXT, new=TEXT)
def test_applies_what_difflib_writes(old: str, new: str) -> None:
    assume(old and old != new)
    assert apply(old, make_diff(old, new)) == new


@settings(derandomize=True, deadline=None)
@given(old=TEXT, new=TEXT, data=st.data())
def test_refuses_any_change_of_the_lines_it_names(old: str, new: str, data: st.DataObject) -> None:
    assume(old and old != new)
    diff = make_diff(old, new)
    (file,) = parse("a.patch", diff).files
    hunk = data.draw(st.sampled_from(file.hunks))
    at = hunk.start - 1 + data.draw(st.integers(0, len(hunk.old) - 1))
    lines = split_lines(old.encode())
    lines[at] = b"changed upstream\n"
    assume(b"".join(lines) != old.encode())
    with pytest.raises(PatchError, match="does not apply"):
        apply_file("a.patch", file, b"".join(lines))


def test_several_files_and_a_header(tmp_path: Path) -> None:
    for name in ("a.cpp", "b.cpp"):
        (tmp_path / name).write_text(OLD)
    diff = b"Subject: two files\nWhy: test\n---\n"
    for name in ("a.cpp", "b.cpp"):
        diff += f"diff --git a/{name} b/{name}\nindex 1..2 100644\n".encode() + make_diff(OLD, NEW, name)
    patch = parse("two.patch", diff)
    apply_patch(patch, tmp_path)
    assert patch.header == "Subject: two files\nWhy: test\n---\n"
    assert [(tmp_path / name).read_text() for name in ("a.cpp", "b.cpp")] == [NEW, NEW]


# ---- what does not fit ----


def test_context_mismatch_names_everything() -> None:
    text = complaint(OLD.replace("line 15", "line 15 // upstream"), make_diff(OLD, NEW))
    assert "patch `a.patch` does not apply: file `src/a.cpp`, hunk 2, line 15" in text
    assert "expected `line 15`" in text
    assert "found    `line 15 // upstream`" in text


def test_offset_is_named_and_not_taken() -> None:
    text = complaint("// new first line\n" + OLD, make_diff(OLD, NEW))
    assert "hunk 1, line 5" in text
    assert "The expected lines stand at line 6; an offset is never guessed." in text


def test_already_applied() -> None:
    assert "Its result already stands there" in complaint(NEW, make_diff(OLD, NEW))


def test_file_too_short() -> None:
    assert "found    the end of the file" in complaint("line 1\nline 2\n", make_diff(OLD, NEW))


def test_missing_newline_at_the_end_counts() -> None:
    diff = make_diff("a\nb\n", "a\nc\n")
    assert "does not apply" in complaint("a\nb", diff)


def test_overlapping_hunks() -> None:
    head, first, second = (
        b"--- a/x\n+++ b/x\n",
        b"@@ -2,2 +2,3 @@\n b\n+x\n c\n",
        b"@@ -3,2 +4,3 @@\n c\n+y\n d\n",
    )
    assert "hunk 2: line 3 lies inside or before the hunk above it" in complaint(
        "a\nb\nc\nd\n", head + first + second
    )


def test_wrong_position_in_the_new_file() -> None:
    diff = make_diff(OLD, NEW).replace(b"+15,3", b"+14,3")
    assert "begins at line 14 of the new file, expected 15" in complaint(OLD, diff)


def test_a_patch_that_fails_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(OLD)
    (tmp_path / "b.cpp").write_text("something else\n")
    with pytest.raises(PatchError, match=r"file `b\.cpp`, hunk 1"):
        apply_patch(parse("two.patch", make_diff(OLD, NEW, "a.cpp") + make_diff(OLD, NEW, "b.cpp")), tmp_path)
    assert (tmp_path / "a.cpp").read_text() == OLD


def test_missing_file_and_link(tmp_path: Path) -> None:
    patch = parse("a.patch", make_diff(OLD, NEW, "a.cpp"))
    with pytest.raises(PatchError, match=r"changes `a\.cpp`, expected a file there, found none"):
        apply_patch(patch, tmp_path)
    (tmp_path / "elsewhere").write_text(OLD)
    (tmp_path / "a.cpp").symlink_to("elsewhere")
    with pytest.raises(PatchError, match="found a link"):
        apply_patch(patch, tmp_path)
    assert (tmp_path / "elsewhere").read_text() == OLD


# ---- what is no patch of ours ----

BODY = b"--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n a\n+b\n c\n"


@pytest.mark.parametrize(
    ("diff", "expected"),
    [
        (
            b"diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n",
            "adds a file",
        ),
        (b"--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n", "adds a file"),
        (b"--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "deletes a file"),
        (b"diff --git a/x b/x\ndeleted file mode 100644\n" + BODY, "deletes a file"),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "changes a file mode"),
        (
            b"diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n",
            "renames or copies a file",
        ),
        (BODY.replace(b"b/x", b"b/y"), "renames `x` to `y`"),
        (b"diff --git a/x b/x\nGIT binary patch\nliteral 3\n", "changes a binary file"),
        (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", "changes a binary file"),
        (b"diff --git a/x b/x\n", "expected `--- a/<file>`, found the end of the file"),
        (BODY.replace(b"/x", b"/../x"), "expected `a/<file inside the tree>`, found `a/../x`"),
        (BODY.replace(b"a/x", b"/etc/passwd"), "expected `a/<file inside the tree>`, found `/etc/passwd`"),
        (BODY.replace(b"/x", b"//etc/passwd"), "expected `a/<file inside the tree>`, found `a//etc/passwd`"),
        (BODY.replace(b"-1,2", b"-1,3"), "its counts do not fit, found the end of the file"),
        (BODY.replace(b"+1,3", b"+1,2"), "its counts do not fit"),
        (BODY + b"-- \n2.39.5\n", "expected `diff --git` or `@@`, found `--`"),
        (b"--- a/x\n+++ b/x\n@@ -1,0 +2 @@\n+b\n", "has no line of context"),
        (b"--- a/x\n+++ b/x\n@@ nonsense @@\n", "expected `@@ -n,n +n,n @@`, found `@@ nonsense @@`"),
        (b"--- a/x\n+++ b/x\n", "changes nothing in `x`"),
        (BODY + BODY, "changes `x` in two places"),
        (b"Subject: only words\n", "found no diff"),
        (b"", "found no diff"),
    ],
)
def test_refused_in_words(diff: bytes, expected: str) -> None:
    with pytest.raises(PatchError) as error:
        parse("bad.patch", diff)
    assert expected in str(error.value)
    assert "patch `bad.patch`, line" in str(error.value)


# ---- the series ----


def test_series_order_and_comments(tmp_path: Path) -> None:
    (tmp_path / "series").write_text("# hooks\nb.patch  # first\n\na.patch\n")
    assert read_series(tmp_path) == ["b.patch", "a.patch"]


def test_series_applies_in_order_and_stops(tmp_path: Path) -> None:
    patches, tree = tmp_path / "patches", tmp_path / "tree"
    patches.mkdir()
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a.cpp").write_text(OLD)
    (patches / "first.patch").write_bytes(make_diff(OLD, NEW))
    (patches / "second.patch").write_bytes(make_diff(NEW, OLD))
    (patches / "series").write_text("first.patch\nsecond.patch\n")
    assert apply_series(patches, tree) == ["first.patch", "second.patch"]
    assert (tree / "src" / "a.cpp").read_text() == OLD
    (patches / "series").write_text("second.patch\nfirst.patch\n")
    with pytest.raises(PatchError, match=r"patch `second\.patch` does not apply"):
        apply_series(patches, tree)


def test_series_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="is missing, expected the patch names"):
        read_series(tmp_path)
    (tmp_path / "series").write_text("gone.patch\n")
    with pytest.raises(PatchError, match=r"patch `gone\.patch` is listed in `series`, but there is no"):
        apply_series(tmp_path, tmp_path)
