// See device_rows.h.

#include "llama/device_rows.h"

#include "llama/status.h"
#include "llama/tensor_bytes.h"

#include <algorithm>
#include <cstring>

namespace draftwood {

namespace {

constexpr int32_t n_single_max = 16; // rows that are copied without a graph

} // namespace

device_rows::device_rows(ggml_backend_t backend, int64_t width, int64_t n) :
    backend_(backend),
    tensors_(ggml_init({ ggml_tensor_overhead(), nullptr, /*no_alloc*/ true })),
    rows_(ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, width, n)),
    buffer_(ggml_backend_alloc_ctx_tensors(tensors_.get(), backend)) {
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory on %s for %lld rows of %lld values", ggml_backend_name(backend), (long long) n,
             (long long) width);
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

void device_rows::copy(int64_t to, const result_rows & from, int64_t first, int64_t n) {
    if (from.tensor) {
        copy(to, from.tensor, first, n);
    } else {
        set_from_host(to * row_bytes(), from.host + first * rows_->ne[0], n * row_bytes());
    }
}

void device_rows::copy(int64_t to, const ggml_tensor * from, int64_t first, int64_t n) {
    copy_part(to * row_bytes(), from, first * from->nb[1], n * row_bytes());
}

void device_rows::copy_side_by_side(int64_t to, const std::vector<result_rows> & from, const int32_t * rows, int32_t n,
                                    row_copies copies) {
    const int64_t width = rows_->ne[0] / (int64_t) from.size();
    const size_t  bytes = width * sizeof(float);
    const bool at_once  = copies && n <= n_single_max && std::all_of(from.begin(), from.end(), [&](const auto & each) {
                             return each.tensor && same_device(each.tensor);
                         });
    std::vector<row_piece> pieces;
    for (size_t k = 0; k < from.size(); ++k) {
        if (!at_once) {
            copy_columns(to, (int64_t) k * width, width, from[k], rows, n);
            continue;
        }
        for (int32_t i = 0; i < n; ++i) {
            pieces.push_back({ (char *) rows_->data + (to + i) * row_bytes() + k * bytes,
                               (const char *) from[k].tensor->data + rows[i] * bytes, bytes });
        }
    }
    if (!pieces.empty()) {
        copies(backend_, pieces.data(), (int) pieces.size());
    }
}

// Columns [column, column + width) of rows `to`.. from rows of f32[width, ..].
void device_rows::copy_columns(int64_t to, int64_t column, int64_t width, const result_rows & from,
                               const int32_t * rows, int32_t n) {
    const size_t at = column * sizeof(float), bytes = width * sizeof(float);
    const bool   one_run = rows[n - 1] - rows[0] == n - 1;
    if (from.tensor && one_run && n > n_single_max && same_device(from.tensor)) {
        copy_block(to, at, width, from.tensor, rows[0], n);
        return;
    }
    for (int32_t i = 0; i < n; ++i) {
        const size_t offset = (to + i) * row_bytes() + at;
        if (from.tensor) {
            copy_part(offset, from.tensor, rows[i] * bytes, bytes);
        } else {
            set_from_host(offset, from.host + rows[i] * width, bytes);
        }
    }
}

void device_rows::set(int64_t to, const float * values) {
    set_from_host(to * row_bytes(), values, row_bytes());
}

std::vector<float> device_rows::get(int64_t row) const {
    std::vector<float> values(rows_->ne[0]);
    ggml_backend_synchronize(backend_);
    ggml_backend_tensor_get(rows_, values.data(), row * row_bytes(), row_bytes());
    return values;
}

row_feed device_rows::feed(row_feed::kind kind, int64_t to, int64_t row, int64_t n, const ggml_tensor * reader) const {
    return { kind, to * row_bytes(), rows_, row * row_bytes(), n * row_bytes(), backend_, same_device(reader) };
}

bool device_rows::lies_beside(const ggml_tensor * other) const {
    return is_on_host(rows_) ? is_on_host(other) : same_device(other);
}

row_piece device_rows::piece(int64_t to, const ggml_tensor * from, int64_t first, int64_t n) const {
    return { (char *) rows_->data + to * row_bytes(), (const char *) from->data + first * from->nb[1],
             n * row_bytes() };
}

bool device_rows::same_device(const ggml_tensor * from) const {
    return buffer_type_of(from) == buffer_type_of(rows_);
}

// Who owns the values may write over them as soon as this returns.
void device_rows::set_from_host(size_t to, const void * values, size_t bytes) {
    if (is_on_host(rows_)) { // a round makes twenty copies, and a backend's call takes longer
        std::memmove((char *) rows_->data + to, values, bytes); // the values may lie in these rows, too
        return;
    }
    ggml_backend_tensor_set_async(backend_, rows_, values, to, bytes);
    ggml_backend_synchronize(backend_);
}

void device_rows::copy_part(size_t to, const ggml_tensor * from, size_t offset, size_t bytes) {
    if (is_on_host(from)) {
        set_from_host(to, (const char *) from->data + offset, bytes);
    } else if (same_device(from)) {
        copy_bytes(backend_, rows_, to, from, offset, bytes);
    } else { // waits until what is queued on this device is done, and with it what was waited for
        std::vector<uint8_t> through(bytes);
        ggml_backend_synchronize(backend_);
        ggml_backend_tensor_get(from, through.data(), offset, bytes);
        ggml_backend_tensor_set(rows_, through.data(), to, bytes);
    }
}

void device_rows::copy_block(int64_t to, size_t at, int64_t width, const ggml_tensor * from, int64_t first, int64_t n) {
    ggml_context_ptr ctx(
        ggml_init({ 4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(4, false), nullptr, /*no_alloc*/ true }));
    ggml_tensor * source = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, width, n);
    source->buffer       = buffer_of(from);
    source->data         = (char *) from->data + first * from->nb[1];
    ggml_tensor * here   = ggml_view_2d(ctx.get(), rows_, width, n, row_bytes(), to * row_bytes() + at);
    here->buffer         = rows_->buffer;
    ggml_cgraph * graph  = ggml_new_graph_custom(ctx.get(), 4, /*grads*/ false);
    ggml_build_forward_expand(graph, ggml_cpy(ctx.get(), source, here));
    ggml_backend_graph_compute_async(backend_, graph);
}

} // namespace draftwood
