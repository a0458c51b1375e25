"""Stage llama-cpp-python's Python files as the private package `draftwood._llama_cpp`.

Copies `llama_cpp/**/*.py` and `py.typed` out of the unpacked sdist and rewrites absolute imports, so that
the copy never touches that name; and has it load libraries that bear our own names. Nothing else changes,
not even a line number: tracebacks match upstream. What is not foreseen here stops the build.
Must not know: how the sdist is fetched or patched, CMake. Standard library only. Entry point: `stage`.
"""

from __future__ import annotations

import ast
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

UPSTREAM = "llama_cpp"
PRIVATE = "draftwood._llama_cpp"

# To the loader, libraries of one name in a process are one: were ours called libllama.so too, libmtmd.so
# would bind to whichever came first (llama-cpp-python 0.3.16 has such sonames). And a folder that a user
# names for llama-cpp-python's libraries is not one of ours. File: old and new text, each found exactly once.
LIBRARIES = {
    "llama_cpp.py": [
        (b'_lib_base_name = "llama"', b'_lib_base_name = "draftwood-llama"'),
        (b'"LLAMA_CPP_LIB_PATH"', b'"DRAFTWOOD_LIB_PATH"'),
    ],
    "mtmd_cpp.py": [
        (b'_libmtmd_base_name = "mtmd"', b'_libmtmd_base_name = "draftwood-mtmd"'),
        (b'"MTMD_CPP_LIB"', b'"DRAFTWOOD_LIB_PATH"'),
    ],
    "_ggml.py": [(b'load_shared_library("ggml",', b'load_shared_library("draftwood-ggml",')],
}


@dataclass(frozen=True, slots=True)
class StageReport:
    """What `stage` did: files copied, files changed, import statements rewritten, library names changed."""

    copied: int
    changed: int
    statements: int
    renamed: int


# What the pinned sdist holds (vendor/llama.lock). When a bump changes it: read the new imports, edit here.
EXPECTED = StageReport(copied=26, changed=16, statements=39, renamed=5)


class StageError(Exception):
    """The sdist's Python files are not what this module was written for."""


def stage(sdist_dir: Path, dest: Path, expected: StageReport | None = EXPECTED) -> StageReport:
    """Write the private package into `dest`, the folder that becomes `draftwood/_llama_cpp`.

    Same sdist, same bytes and same mtimes, so that a second run changes nothing that a build tool looks at.
    Python files that an earlier run left and this sdist lacks are removed; other files in `dest` stay.
    Errors: StageError when counts differ from `expected` (None: not compared), or from `rewrite`.
    Source: design section 5. Test: tests/unit/test_pyfiles.py.
    """
    source_dir = sdist_dir / UPSTREAM
    sources = sorted([*source_dir.rglob("*.py"), *source_dir.rglob("py.typed")])
    if not sources:
        raise StageError(
            f"no Python files under {source_dir}, expected an unpacked llama-cpp-python sdist."
            "\n\nhint: unpack it again, or point the build at another copy."
        )
    changed = statements = renamed = 0
    kept = set()
    for source in sources:
        data = source.read_bytes()
        if source.suffix == ".py":
            data, imports = rewrite(data, str(source.relative_to(sdist_dir)))
            data, names = _rename_libraries(data, str(source.relative_to(source_dir)))
            changed += bool(imports or names)
            statements += imports
            renamed += names
        target = dest / source.relative_to(source_dir)
        _write(target, data)
        kept.add(target)
    for stale in {*dest.rglob("*.py"), *dest.rglob("py.typed")} - kept:
        stale.unlink()
    report = StageReport(len(sources), changed, statements, renamed)
    if expected is not None and report != expected:
        raise StageError(
            f"staging {source_dir} gave {report}, expected {expected}."
            "\n\nhint: after a bump, read the new imports and edit EXPECTED in _build/pyfiles.py."
        )
    return report


def rewrite(source: bytes, filename: str) -> tuple[bytes, int]:
    """Return `source` (UTF-8) with absolute imports of `llama_cpp` renamed, and how many statements.

    Errors: StageError with file and line for an import in a layout that is not foreseen, or a dynamic one.
    """
    lines = source.splitlines(keepends=True)
    nodes = _upstream_imports(ast.parse(source, filename))
    for node in reversed(nodes):  # from the back, so that columns of earlier statements on a line still hold
        row = node.lineno - 1
        before, after = _old_and_new(node)
        # ast counts columns in UTF-8 bytes, which is why the whole file is handled as bytes
        head, rest = lines[row][: node.col_offset], lines[row][node.col_offset :]
        if not rest.startswith(before):
            raise StageError(
                f"{filename}:{node.lineno}: found `{rest.decode().rstrip()}`, expected `{before.decode()}`."
                "\n\nhint: teach _build/pyfiles.py this layout; it rewrites imports that stand on one line."
            )
        lines[row] = head + after + rest[len(before) :]
    result = b"".join(lines)
    tree = ast.parse(result, filename)
    left = [node.lineno for node in _upstream_imports(tree)] + _dynamic_imports(tree)
    if left:
        raise StageError(
            f"{filename}:{left[0]}: an import of `{UPSTREAM}` is left, expected none after rewriting."
            "\n\nhint: a name that is imported at run time needs a rule of its own in _build/pyfiles.py."
        )
    return result, len(nodes)


def _is_upstream(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] == UPSTREAM


def _upstream_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level == 0 and _is_upstream(node.module):
                found.append(node)
        elif isinstance(node, ast.Import) and any(_is_upstream(alias.name) for alias in node.names):
            found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _dynamic_imports(tree: ast.Module) -> list[int]:
    """Lines of `__import__("llama_cpp...")` and its kin, which no rewriting of statements would catch."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in {"__import__", "import_module", "find_spec"}
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and _is_upstream(str(node.args[0].value))
    ]


def _old_and_new(node: ast.Import | ast.ImportFrom) -> tuple[bytes, bytes]:
    """The text that `node` must start with, and the text that takes its place."""
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return f"from {module} import".encode(), f"from {_private(module)} import".encode()
    names = [new for alias in node.names for new in _renamed(alias)]
    return ast.unparse(node).encode(), ast.unparse(ast.Import(names)).encode()


def _renamed(alias: ast.alias) -> list[ast.alias]:
    if not _is_upstream(alias.name):
        return [alias]
    private = ast.alias(_private(alias.name), alias.asname or UPSTREAM)
    if alias.asname or alias.name == UPSTREAM:
        return [private]
    # `import llama_cpp.llama` loads the submodule but binds the package: load first, then bind the name anew.
    # Both find a module that is still being imported, so llama_cache's cycle works as it does upstream.
    return [private, ast.alias(PRIVATE, UPSTREAM)]


def _private(name: str) -> str:
    return PRIVATE + name[len(UPSTREAM) :]


def _rename_libraries(data: bytes, filename: str) -> tuple[bytes, int]:
    names = LIBRARIES.get(filename, [])
    for before, after in names:
        if data.count(before) != 1:
            raise StageError(
                f"{filename}: found `{before.decode()}` {data.count(before)} times, expected once."
                "\n\nhint: see how this version finds its libraries and edit LIBRARIES in _build/pyfiles.py."
            )
        data = data.replace(before, after)
    return data, len(names)


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    # One mtime for all would be quiet too, but bytecode caches and CMake's install would then miss changed
    # content. So the mtime follows the content: some second between 2001 and 2018.
    stamp = 1_000_000_000 + zlib.crc32(data) % (1 << 29)
    os.utime(target, (stamp, stamp))
