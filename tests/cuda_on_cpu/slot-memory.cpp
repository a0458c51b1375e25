// Stands in for what src/ops/expert-slots/slot-memory.cu has and slot-memory.cpp has not: queues beside the step's.
// Here they need no streams and no events. Experts and slots lie in plain memory.

#include "ops/expert-slots/slot-memory.h"

#include "ops/expert-slots/beside.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/stage.h"

#include <algorithm>
#include <cmath>

using namespace dw::expert_slots;

namespace {

constexpr size_t n_logits = (size_t) max_guess_rows * max_experts;

beside * make_beside(int) {
    auto * copies  = new beside();
    copies->logits = new float[n_logits];
    std::fill_n(copies->logits, n_logits, NAN);
    return copies;
}

void free_beside(int, beside * copies) {
    if (copies) {
        delete[] copies->logits;
    }
    delete copies;
}

stage * make_stage(int) {
    return new stage();
}

void free_stage(int, stage * of) {
    delete of;
}

} // namespace

// of_cpu: a copy of ggml-cpu's
extern "C" void cuda_on_cpu_complete(dw::slot_memory * of_cpu) {
    of_cpu->make_stage  = make_stage;
    of_cpu->free_stage  = free_stage;
    of_cpu->make_beside = make_beside;
    of_cpu->free_beside = free_beside;
}
