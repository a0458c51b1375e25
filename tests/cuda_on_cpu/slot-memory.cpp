// Stands in for what src/ops/expert-slots/slot-memory.cu has and slot-memory.cpp has not: queues beside the step's.
// Experts and slots lie in plain memory. Kernels run when they are launched; with CUDA_ON_CPU_QUEUES=late in the
// environment those beside the step run when the step waits for them, or memory is read.

#include "ops/expert-slots/slot-memory.h"

#include "ops/expert-slots/copy-streams.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/stage.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

using namespace dw::expert_slots;

namespace {

constexpr size_t n_logits = (size_t) max_guess_rows * max_experts;

copy_streams * make_streams(int) {
    static char  name;
    const char * when = std::getenv("CUDA_ON_CPU_QUEUES");
    auto *       copies = new copy_streams();
    copies->logits = new float[n_logits];
    std::fill_n(copies->logits, n_logits, NAN);
    if (when && std::strcmp(when, "late") == 0) {
        copies->stream = copies->finding = &name;
    }
    return copies;
}

void free_streams(int, copy_streams * copies) {
    cuda_on_cpu::run_queued();
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

decltype(dw::slot_memory::copy) plain_copy;

bool copy(int device, void * to, const void * from, size_t n_bytes) {
    cuda_on_cpu::run_queued();
    return plain_copy(device, to, from, n_bytes);
}

} // namespace

// of_cpu: a copy of ggml-cpu's
extern "C" void cuda_on_cpu_complete(dw::slot_memory * of_cpu) {
    of_cpu->make_stage  = make_stage;
    of_cpu->free_stage  = free_stage;
    of_cpu->make_streams = make_streams;
    of_cpu->free_streams = free_streams;
    plain_copy          = of_cpu->copy;
    of_cpu->copy        = copy;
}
