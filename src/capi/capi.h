// What the files of the C line share: the handle, argument checks, the guard. Contract: draftwood.h.
// Test: tests/model/engine/test_arguments.py, test_tree_input.py, tests/unit/test_capi.py.

#pragma once

#include "llama/status.h"
#include "round/propose_batch.h"
#include "round/verify_batch.h"

#include <type_traits>

struct dw_engine {
    draftwood::session impl;
};

namespace draftwood {

template <typename... Pointers> void require(const char * call, const Pointers *... pointers) {
    if (((pointers == nullptr) || ...)) {
        fail(DW_ERR_ARGUMENT, "%s was given a null pointer", call);
    }
}

// structs may grow at their end: only the same layout is accepted, so that no caller reads unset bytes
template <typename T> void require_layout(const char * name, const T & value) {
    if (value.struct_size != sizeof(T)) {
        fail(DW_ERR_ARGUMENT, "%s has struct_size %u; this library expects %zu (API version %d)", name,
             value.struct_size, sizeof(T), DW_API_VERSION);
    }
}

// Convert trees. Errors: DW_ERR_ARGUMENT for a tree that is invalid, or not in order of depth with by_depth.
token_tree from_native(const dw_tree & tree, bool by_depth);
void       to_native(const token_tree & tree, dw_tree & out);

// run `body(engine)` behind the guard
template <typename F> dw_status with(dw_engine * engine, const char * call, F && body) noexcept {
    return guard([&]() -> dw_status {
        require(call, engine);
        if constexpr (std::is_same_v<decltype(body(engine->impl)), dw_status>) {
            return body(engine->impl);
        } else {
            body(engine->impl);
            return DW_OK;
        }
    });
}

} // namespace draftwood
