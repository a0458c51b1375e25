"""Save and load tiny-moe weights as safetensors parts small enough for any transfer.

Must not know: the model's forward pass, GGUF. Matrices are kept as F16, the rest as F32, as in the GGUF.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PART = 15 << 20  # bytes; under 16 MiB with the header


def is_matrix(name: str, value: Tensor | npt.NDArray[np.floating]) -> bool:
    """Tell whether a tensor of that name is stored as F16; vectors, routers and convolutions stay F32."""
    return value.ndim >= 2 and not name.endswith(
        ("conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight")
    )


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state in its stored types, on the CPU; values beyond F16 are an error."""
    out = {
        k: v.detach().cpu().to(torch.float16 if is_matrix(k, v) else torch.float32) for k, v in state.items()
    }
    for k, v in out.items():
        if not v.isfinite().all():
            raise ValueError(f"`{k}` is not finite after rounding to {v.dtype}")
    return out


def save_state(state: dict[str, Tensor], folder: Path) -> None:
    """Write the rounded state as `part-N.safetensors` files under 16 MiB each."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in rounded(state).items():
        n = value.numel() * value.element_size()
        if size + n > PART:
            parts.append({})
            size = 0
        parts[-1][name] = value.contiguous()
        size += n
    for i, part in enumerate(parts):
        save_file(part, folder / f"part-{i}.safetensors")


def load_state(folder: Path) -> dict[str, Tensor]:
    """Read the parts of a folder into one f32 state dict."""
    parts = sorted(folder.glob("part-*.safetensors"))
    if not parts:
        raise FileNotFoundError(f"no `part-*.safetensors` in `{folder}`; expected a checkpoint of train.py")
    return {k: v.float() for p in parts for k, v in load_file(p).items()}
