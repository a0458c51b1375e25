"""A GGUF cut into several files, as llama.cpp names and numbers them. Must not know: what is in it."""

from __future__ import annotations

from pathlib import Path

import gguf


def split(model: Path | str, folder: Path, n_tensors: int) -> list[Path]:
    """Write the model's tensors to files in `folder`, n_tensors each; return their paths."""
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(None, architecture, split_max_tensors=n_tensors)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(folder / f"{Path(model).stem}.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*-of-*.gguf"))
