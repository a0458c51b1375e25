"""Where the repository is; importing this lets tools import the build's own modules. Import it first."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "_build"))
