"""A small source distribution and a root that pins it, for tests of the pin and of the patch queue."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

NAME = "fake_sdist"
BACKEND = "absent_backend.folder.build"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

CPP = "".join(f"int line_{i};\n" for i in range(1, 11))
FILES = {
    "PKG-INFO": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
    # neither is installed, nor in any index: a download needs no build backend
    "pyproject.toml": f'[build-system]\nrequires = ["absent-requirement"]\nbuild-backend = "{BACKEND}"\n',
    "fake_sdist/__init__.py": "",
    ".git/modules/vendor/llama.cpp/HEAD": COMMIT + "\n",
    "vendor/llama.cpp/.git": "gitdir: ../../.git/modules/vendor/llama.cpp\n",
    "vendor/llama.cpp/.gitignore": "*.o\n",
    "vendor/llama.cpp/docs/page.md": "left out\n",
    "vendor/llama.cpp/src/a.cpp": CPP,
    "vendor/llama.cpp/src/b.h": (
        "enum color {\n    RED,\n    BLUE,\n};\n\nstruct llama_fake_params {\n    int n;\n};\n"
    ),
    "vendor/llama.cpp/include/llama.h": "int llama_version(void);\nint llama_commit(void);\n",
    "vendor/llama.cpp/common/arg.cpp": CPP,
    "vendor/llama.cpp/run.sh": "#!/bin/sh\n",
}


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    """Make one archive member, from the year 2001 as real ones are old."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname, info.mtime = len(data), kind, link, 1_000_000_000
    info.mode = 0o755 if name.endswith(".sh") else 0o644
    return info, data


def write_archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> str:
    """Write a tar.gz and return its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sdist(folder: Path, version: str = "1.0", **changed: str) -> tuple[Path, str]:
    """Write the archive of a version, `name=text` replacing src/name.cpp; returns its path and sha256."""
    top = f"{NAME}-{version}"
    texts = FILES | {f"vendor/llama.cpp/src/{name}.cpp": text for name, text in changed.items()}
    path = folder / f"{top}.tar.gz"
    return path, write_archive(path, [member(f"{top}/{name}", text.encode()) for name, text in texts.items()])


def write_lock(root: Path, sha256: str, size: int = 1000) -> None:
    """Write `vendor/llama.lock` for version 1.0."""
    (root / "vendor").mkdir(parents=True, exist_ok=True)
    (root / "vendor" / "llama.lock").write_text(
        f'# the pin\nname = "{NAME}"\nversion = "1.0"\nsha256 = "{sha256}"\n'
        f'size = {size}\nbackend = "{BACKEND}"\ninner = "vendor/llama.cpp"\n'
        f'commit = "{COMMIT}"\nleave_out = ["vendor/llama.cpp/docs"]\n'
    )


def write_patch(root: Path, name: str, body: str) -> None:
    """Write one patch file and add it to the series."""
    patches = root / "patches"
    patches.mkdir(exist_ok=True)
    (patches / name).write_text(body)
    series = patches / "series"
    names = series.read_text() if series.is_file() else ""
    if name not in names.split():
        series.write_text(f"{names}{name}\n")


HOOK_5 = """\
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -5,2 +5,3 @@ int line_4;
 int line_5;
+hook_5();
 int line_6;
"""


def patch_text(
    subject: str = "a : hook after line 5",
    diff: str = HOOK_5,
    **fields: str,
) -> str:
    """Write out a patch that keeps every rule but for what the arguments change; an empty field goes."""
    header = {
        "Subject": subject,
        "Why": "a test needs it. Rejected: none",
        "Class": "hook",
        "Drop-when": "the test goes",
        "Checked-at": COMMIT[:9],
    } | {name.replace("_", "-"): text for name, text in fields.items()}
    return "".join(f"{name}: {text}\n" for name, text in header.items() if text) + "---\n" + diff


def make_root(folder: Path) -> Path:
    """Make a repository root with the pin, its archive in `vendor/`, and an empty series."""
    root = folder / "root"
    path, sha256 = write_sdist(root / "vendor")
    write_lock(root, sha256, path.stat().st_size)
    (root / "patches").mkdir()
    (root / "patches" / "series").write_text("# hooks\n")
    (root / "patches" / "README.md").write_text("# Patches\n<!-- table: begin -->\n<!-- table: end -->\n")
    return root
