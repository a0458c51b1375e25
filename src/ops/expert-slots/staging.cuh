// How a prompt's experts come into their stage (stage.h): by kernels, or by copy engines where few are in slots.
// Included by one .cu file alone. Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/kernels.cuh"
#include "ops/expert-slots/stage.h"

namespace dw::expert_slots {

constexpr int n_stage_blocks = 32; // beside another layer's products

// all experts that are not resident, into the layer's place in the stage
template <typename Word> __global__ void stage_absent(const layer of) {
    const table &      state = *of.state;
    const pieces<Word> all(of);
    for (int64_t i = blockIdx.x; i < of.n_experts * all.n_all; i += gridDim.x) {
        const int expert = (int) (i / all.n_all);
        if (state.entries[expert].slot < 0) {
            all.copy(of, i % all.n_all, expert, of.first_staged, expert);
        }
    }
}

// Copy engines leave the multiprocessors to the products, but know nothing of the table: with less than half of the
// experts in slots, they copy all of them.
inline void copy_all(const layer & of, cudaStream_t stream) {
    for (int p = 0; p < of.n_parts; ++p) {
        const part & each = of.parts[p];
        char * const to   = each.base + of.first_staged[each.plane] * each.stride;
        CUDA_CHECK(cudaMemcpyAsync(to, each.base, of.n_experts * each.stride, cudaMemcpyDefault, stream));
    }
}

inline void copy_absent(const layer & of, cudaStream_t stream) {
    if (2 * of.n_slots < of.n_experts) {
        copy_all(of, stream);
        return;
    }
    const auto copy = in_words_of(of, sizeof(uint4)) ? stage_absent<uint4> : stage_absent<uint16_t>;
    copy<<<n_stage_blocks, n_fill_threads, 0, stream>>>(of);
}

inline bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Copies that were queued ahead are done before what `stream` gets next. Returns whose they were; nullptr: none.
inline const layer * join_staged(stage & stage, cudaStream_t stream) {
    const layer * coming = stage.coming;
    stage.coming         = nullptr;
    if (coming && is_captured(stream) && !stage.is_captured) {
        CUDA_CHECK(cudaStreamSynchronize(stage.stream)); // queued outside of the graph
    } else if (coming) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, stage.is_ready[coming->place], 0));
    }
    return coming;
}

// The layer's own experts were queued by the layer before it; the first layer of a graph has to copy its own. Then the
// next layer's are queued, if this graph has it with as many rows. Their place is free: the layer that used it has
// computed. A capture must join what it queued, so there the next layer has to be in the same piece of the graph.
inline void copy_ahead(const layer & of, const ggml_tensor * node, bool is_here, cudaStream_t stream) {
    stage & stage = *of.staged;
    if (!is_here) {
        copy_absent(of, stream);
    }
    const bool captured = is_captured(stream);
    if (of.next && has(node, has_next) && (!captured || has(node, next_is_joined))) {
        stage.coming      = of.next;
        stage.is_captured = captured;
        CUDA_CHECK(cudaEventRecord(stage.is_free, stream));
        CUDA_CHECK(cudaStreamWaitEvent(stage.stream, stage.is_free, 0));
        copy_absent(*of.next, stage.stream);
        CUDA_CHECK(cudaEventRecord(stage.is_ready[of.next->place], stage.stream));
    }
}

} // namespace dw::expert_slots
