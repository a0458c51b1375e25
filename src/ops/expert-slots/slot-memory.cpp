// slot-memory.h on a CPU: all of it is plain memory.

#include "ops/expert-slots/slot-memory.h"

#include "ggml-backend.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr size_t page_bytes = 4096;

void * allocate(int, size_t n_bytes) {
    void * at = ::operator new(n_bytes, std::align_val_t(page_bytes), std::nothrow);
    if (at) {
        std::memset(at, 0, n_bytes);
    }
    return at;
}

void release(void * at) {
    ::operator delete(at, std::align_val_t(page_bytes));
}

} // namespace

const dw::slot_memory dw::slot_memory_on_cpu = {
    /*refusal*/ [](int) -> const char * { return nullptr; },
    /*page*/ [](int) { return page_bytes; },
    /*reserve*/ allocate,
    /*map_host*/ [](int, void *, size_t) { return true; },
    /*map_device*/ [](int, void *, size_t) { return true; },
    /*unmap*/ [](int, void *, size_t) {},
    /*release*/ [](int, void * at, size_t) { release(at); },
    /*create*/ [](int, size_t) -> void * { return nullptr; },
    /*map_shared*/ [](int, void *, size_t, void *) { return false; },
    /*destroy*/ [](int, void *) {},
    /*allocate*/ allocate,
    /*free*/ [](int, void * at) { release(at); },
    /*copy*/
    [](int, void * to, const void * from, size_t n_bytes) {
        std::memcpy(to, from, n_bytes);
        return true;
    },
    /*make_stage*/ [](int) -> dw::expert_slots::stage * { return nullptr; },
    /*free_stage*/ [](int, dw::expert_slots::stage *) {},
    /*make_streams*/ [](int) -> dw::expert_slots::copy_streams * { return nullptr; },
    /*free_streams*/ [](int, dw::expert_slots::copy_streams *) {},
};
