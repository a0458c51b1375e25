"""What `Host` promises, `Llama` has."""

from __future__ import annotations

from draftwood.generate.host import Host


def test_a_llama_has_what_a_host_has(on):
    names = {name for name in {**vars(Host), **Host.__annotations__} if not name.startswith("__")}
    names -= {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
    assert {"ctx", "n_ctx", "scores"} <= names
    assert [name for name in names if not hasattr(on, name)] == []
