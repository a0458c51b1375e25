"""With draftwood switched off a build computes what the pinned llama.cpp computes, bit for bit.

The same script runs twice, each in its own process: on our library through `Llama(exact=False,
speculation="off")`, and on a pristine one through llama-cpp-python's own class (bench/pristine.py). How fast
either is: bench/off_speed.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import pristine

# argv: the side, pristine.package(), the result, models
SCRIPT = """
import itertools, sys
import numpy as np
import pristine

side, package, result, *models = sys.argv[1:]
Llama, own = pristine.llama_class(side, package)
SETTINGS = [{}, {"flash_attn": True}, {"n_ubatch": 32}]
if side == "ours":
    assert Llama(models[0], verbose=False, **own)._engine is None
found = {}
for m, model in enumerate(models):
    for s, settings in enumerate(SETTINGS):
        llm = Llama(model, n_ctx=512, n_threads=2, n_threads_batch=2, seed=7, logits_all=True, verbose=False,
                    **own, **settings)
        for rows in (1, 2, 7, 64, 65, 200):
            prompt = [(7 * i * i + 3 * i + rows) % 380 for i in range(rows)]
            tokens = list(itertools.islice(llm.generate(prompt, temp=0.0), 12))
            name = f"model {m}, {settings}, {rows} rows"
            found[name + ": tokens"] = np.array(tokens)
            found[name + ": logits"] = llm.scores[: llm.n_tokens].copy()
        found[name + ": sampled"] = np.array(list(itertools.islice(llm.generate(prompt[:9], temp=0.9), 40)))
        llm.close()
np.savez(result, **found)
"""


@pytest.fixture(scope="session")
def library() -> Path:
    """The folder of a pristine libllama, built if need be."""
    try:
        return pristine.library()
    except pristine.NoPristineError as error:
        pytest.skip(str(error))


def results(side: str, library: Path, tmp_path: Path, models: list[str]) -> dict[str, np.ndarray]:
    """Run SCRIPT on one library."""
    result = tmp_path / f"{side}.npz"
    command = [sys.executable, "-c", SCRIPT, side, pristine.package(), str(result), *models]
    environ = pristine.environment(side, library, tmp_path)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(result) as found:
        return dict(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_off_is_pristine(library, gguf, llama_arch, tmp_path):
    models = [
        gguf("moe-mtp"),
        gguf("dense-mtp"),
        gguf("q8"),
        gguf("q4k"),
        gguf("mix"),
        gguf("real-heads"),
        gguf("odd"),
        llama_arch,
    ]
    ours = results("ours", library, tmp_path, models)
    theirs = results("pristine", library, tmp_path, models)
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(models) * 3 * 13
    different = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} differ: {different[:8]}"
