// Runs of tensors that lie where a test says, for test_tensor_runs.py.

#include "verify/tensor_runs.h"

#include <vector>

// widths, places i64[n]: values of a row of each tensor [width, 2], and where it begins, in bytes; types, owners
// i32[n]: of ggml_type, and of buffers by number, which are asked for nothing. The second half of tensors are views.
// runs i64[n][4]: first, number, stride, and what ggml says is the number of bytes of all as one. Returns the number of
// runs.
extern "C" int find_runs(const int64_t * widths, const int64_t * places, const int32_t * types, const int32_t * owners,
                         int n, int64_t * runs) {
    ggml_context *             ctx = ggml_init({ 1 << 20, nullptr, /*no_alloc*/ true });
    std::vector<char>          memory(1); // only its address is used
    std::vector<ggml_tensor *> tensors;
    for (int i = 0; i < n; ++i) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, (ggml_type) types[i], widths[i], 2);
        t->data         = memory.data() + places[i];
        t->buffer       = (ggml_backend_buffer *) (memory.data() + owners[i]);
        tensors.push_back(i < n / 2 ? t : ggml_view_2d(ctx, t, widths[i], 2, t->nb[1], 0));
    }
    const auto found = draftwood::runs_of(tensors);
    for (size_t i = 0; i < found.size(); ++i) {
        const ggml_tensor * all   = draftwood::as_one(ctx, tensors, found[i], 2);
        const int64_t       run[] = { (int64_t) found[i].first, found[i].n, (int64_t) found[i].stride,
                                all->data == tensors[found[i].first]->data ? (int64_t) ggml_nbytes(all) : -1 };
        std::copy(run, run + 4, runs + 4 * i);
    }
    ggml_free(ctx);
    return (int) found.size();
}
