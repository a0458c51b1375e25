"""_capi.py and bench/testing_api.py against the headers of src/include, by reading the headers.

The library itself is checked when it is loaded (dw_api_version); this finds what only the texts show.
"""

import ctypes
import re
from pathlib import Path

import pytest
from draftwood.engine import _capi

from bench import testing_api

INCLUDE = Path(__file__).resolve().parents[2] / "src" / "include"


def code_of(header):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", (INCLUDE / header).read_text(), flags=re.DOTALL)


HEADERS = {("draftwood.h", "draftwood-experts.h"): _capi, ("draftwood-testing.h",): testing_api}
CODE = {headers: "\n".join(map(code_of, headers)) for headers in HEADERS}
ALL = "\n".join(CODE.values())

STRUCTS = {
    "dw_params": _capi.Params,
    "dw_request_params": _capi.RequestParams,
    "dw_stats": _capi.Stats,
    "dw_model_info": _capi.ModelInfo,
    "dw_curve": _capi.Curve,
    "dw_tree": _capi.Tree,
    "dw_expert_params": _capi.ExpertParams,
    "dw_expert_stats": _capi.ExpertStats,
    "dw_expert_layer": _capi.ExpertLayer,
    "dw_readahead_stats": _capi.ReadaheadStats,
}
SCALARS = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "llama_token": ctypes.c_int32,
    "dw_status": ctypes.c_int,
}
POINTERS = {
    "char": ctypes.c_char_p,
    "void": ctypes.c_void_p,
    "dw_engine": _capi.EngineHandle,
    "dw_expert_pool": _capi.PoolHandle,
    "dw_expert_readahead": _capi.ReadaheadHandle,
    "dw_cost_model": testing_api.CostModelHandle,
    "dw_accepted_log": testing_api.AcceptedLogHandle,
    "dw_thread_choice": testing_api.ThreadChoiceHandle,
    "dw_batch_model": testing_api.BatchModelHandle,
    "llama_context": ctypes.c_void_p,
    "llama_model": ctypes.c_void_p,
    "llama_sampler": ctypes.c_void_p,
    "llama_context_params": ctypes.POINTER(_capi._llama.llama_context_params),
    **{name: ctypes.POINTER(struct) for name, struct in STRUCTS.items()},
}


def constants(code=ALL):
    defines = {name: int(value) for name, value in re.findall(r"#define\s+(DW_\w+)\s+(\d+)\s*$", code, re.M)}
    for body in re.findall(r"typedef enum \w+ \{(.*?)\}", code, re.DOTALL):
        defines |= {name: int(value) for name, value in re.findall(r"(DW_\w+)\s*=\s*(\d+)", body)}
    return defines


def value_of(text):
    return int(text) if text.isdigit() else constants()[text]


def fields(struct):
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", ALL, re.DOTALL).group(1)
    for kind, name, count in re.findall(r"([\w\s*]+?)(\w+)\s*(?:\[(\w+)\])?\s*;", body):
        one = type_of(kind)
        yield name, one * value_of(count) if count else one


def type_of(declared, *, is_result=False):
    """Return the ctypes type of one argument or result, its name already taken off."""
    words = declared.replace("const", " ").replace("struct", " ").split()
    base, stars = words[0], "".join(words[1:])
    if stars == "":
        return None if base == "void" and is_result else SCALARS[base]
    if stars == "*":
        return POINTERS[base] if base in POINTERS else ctypes.POINTER(SCALARS[base])
    assert POINTERS[base] is ctypes.c_void_p, declared
    assert stars == "**", declared
    return ctypes.POINTER(POINTERS[base])


def functions(code=ALL):
    found = {}
    for result, name, arguments in re.findall(
        r"DW_API\s+([\w\s*]+?)\s*(dw_\w+)\s*\((.*?)\)\s*;", code, re.DOTALL
    ):
        parts = [] if arguments.strip() == "void" else arguments.split(",")
        # "const llama_token * draft": the last word is the argument's name
        found[name] = (result, [re.sub(r"\w+\s*$", "", " ".join(part.split())) for part in parts])
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_headers_are_read_at_all(header):
    code = CODE[header]
    assert len(functions(code)) == code.count("DW_API ") - code.count("#define DW_API ")
    assert len(functions(code)) > 15
    assert len(constants(code)) >= 4


@pytest.mark.parametrize("header", HEADERS)
def test_constants(header):
    values, module = constants(CODE[header]), HEADERS[header]
    theirs = {name for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}
    assert theirs == {name.removeprefix("DW_") for name in values}, "the same names on both sides"
    for name, value in values.items():
        assert getattr(module, name.removeprefix("DW_")) == value, name


@pytest.mark.parametrize("struct", STRUCTS)
def test_struct_fields(struct):
    assert list(STRUCTS[struct]._fields_) == list(fields(struct))


def test_all_structs_are_there():
    assert set(re.findall(r"typedef struct (\w+) \{", ALL)) == set(STRUCTS)


@pytest.mark.parametrize("header", HEADERS)
def test_functions_are_the_same_on_both_sides(header):
    assert set(functions(CODE[header])) == set(HEADERS[header].SIGNATURES)


@pytest.mark.parametrize("name", functions())
def test_signature(name):
    result, arguments = functions()[name]
    declared = (type_of(result, is_result=True), [type_of(argument) for argument in arguments])
    assert {**_capi.SIGNATURES, **testing_api.SIGNATURES}[name] == declared
    function = getattr(_capi.lib, name)
    assert (function.restype, list(function.argtypes)) == declared


def test_the_library_agrees_on_sizes():
    params = _capi.Params()
    _capi.lib.dw_params_init(ctypes.byref(params))
    assert params.struct_size == ctypes.sizeof(_capi.Params)
