// Tensors of many layers as one: see tensor_runs.h.

#include "verify/tensor_runs.h"

#include <algorithm>

namespace draftwood {

namespace {

const ggml_tensor * owner_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

bool are_alike(const ggml_tensor * a, const ggml_tensor * b) {
    return a->type == b->type && std::equal(a->ne, a->ne + GGML_MAX_DIMS, b->ne) &&
           std::equal(a->nb, a->nb + GGML_MAX_DIMS, b->nb) && owner_of(a)->buffer == owner_of(b)->buffer &&
           a->data < b->data;
}

size_t distance(const ggml_tensor * a, const ggml_tensor * b) {
    return (const char *) b->data - (const char *) a->data;
}

} // namespace

std::vector<tensor_run> runs_of(const std::vector<ggml_tensor *> & tensors) {
    std::vector<tensor_run> runs;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const ggml_tensor * before = i > 0 ? tensors[i - 1] : nullptr;
        if (before && are_alike(before, tensors[i])) {
            tensor_run & last   = runs.back();
            const size_t stride = distance(before, tensors[i]);
            if (last.n == 1 || last.stride == stride) {
                last.stride = stride;
                ++last.n;
                continue;
            }
        }
        runs.push_back({ i, 1, tensors[i]->nb[3] });
    }
    return runs;
}

ggml_tensor * as_one(ggml_context * ctx, const std::vector<ggml_tensor *> & tensors, const tensor_run & run, int dim) {
    const ggml_tensor * first             = tensors[run.first];
    int64_t             ne[GGML_MAX_DIMS] = { 1, 1, 1, 1 };
    std::copy(first->ne, first->ne + dim, ne);
    ne[dim]           = run.n;
    ggml_tensor * all = ggml_new_tensor(ctx, first->type, GGML_MAX_DIMS, ne);
    std::copy(first->nb, first->nb + dim, all->nb);
    for (int i = dim; i < GGML_MAX_DIMS; ++i) {
        all->nb[i] = i == dim ? run.stride : all->nb[i - 1] * ne[i - 1];
    }
    all->data   = first->data;
    all->buffer = owner_of(first)->buffer;
    return all;
}

} // namespace draftwood
