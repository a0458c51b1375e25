"""An environment from the packages of the Python that runs this: for machines that reach no index.

    python3 tools/borrow.py FOLDER NAME...

Makes a virtual environment without pip in FOLDER and copies the files of these distributions into it, with
those that they require without a condition. `python3 -m pip --python FOLDER/bin/python install --no-index`
adds wheels. Test: tests/unit/test_borrow.py.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path


def required(names: list[str]) -> dict[str, metadata.Distribution]:
    """Return the distributions of these names, and all that they require."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in found:
            found[name] = distribution = metadata.distribution(name)
            needs = [line for line in distribution.requires or [] if ";" not in line]
            waiting += [re.match(r"[\w.-]+", line)[0] for line in needs]
    return found


def copy(distribution: metadata.Distribution, site: Path) -> None:
    """Copy what lies in site-packages; scripts stay behind."""
    for path in distribution.files or []:
        if ".." not in path.parts and "__pycache__" not in path.parts:
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path.locate(), target)


def main() -> None:
    folder, *names = sys.argv[1:]
    try:
        distributions = required(names)
    except metadata.PackageNotFoundError as error:
        raise SystemExit(f"found no {error.name} beside {sys.executable}; expected it there") from None
    venv.create(folder, clear=True, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": folder, "platbase": folder}))
    for distribution in distributions.values():
        copy(distribution, site)
    print(*(f"{each.metadata['Name']}=={each.version}" for each in distributions.values()))


if __name__ == "__main__":
    main()
