// Rows of f32 values in the memory of one device, which other rows are copied into in its stream: hidden states on
// their way from one llama_context to another. On a CPU copies are made at once. Must not know: tokens, positions.
// Test: tests/model/engine, tests/gpu/test_same_text.py.

#pragma once

#include "ggml-cpp.h"
#include "llama/decode_request.h"
#include "llama/results.h"
#include "llama/row_copies.h"

#include <vector>

namespace draftwood {

class device_rows {
  public:
    // f32[width, n] where `backend` computes, all zero; throws failure
    device_rows(ggml_backend_t backend, int64_t width, int64_t n);

    // Rows [first, first + n) of another decode or tensor to `to`.., as wide as these; a single one may be wider. They
    // must be complete when this backend's stream comes to the copy.
    void copy(int64_t to, const result_rows & from, int64_t first, int64_t n);
    void copy(int64_t to, const ggml_tensor * from, int64_t first, int64_t n);

    // Row `to` + i becomes row rows[i] of each of `from`, results of one decode of equal width, side by side; rows
    // i32[n]. Many rows are copied by graphs, a few in one launch of `copies`. Without it they are copied one by one.
    void copy_side_by_side(int64_t to, const std::vector<result_rows> & from, const int32_t * rows, int32_t n,
                           row_copies copies);

    void               set(int64_t to, const float * values);
    std::vector<float> get(int64_t row) const; // waits for what is queued

    // whether another tensor is in the same memory as these rows: then copies from it can be pieces of a launch
    bool      lies_beside(const ggml_tensor * other) const;
    row_piece piece(int64_t to, const ggml_tensor * from, int64_t first, int64_t n) const;

    // rows [row, row + n) as an input of a decode, from row `to` of it on; reader: a weight that it is first used with
    row_feed feed(row_feed::kind kind, int64_t to, int64_t row, int64_t n, const ggml_tensor * reader) const;

    const ggml_tensor * tensor() const { return rows_; }
    size_t              row_bytes() const { return rows_->nb[1]; }
    ggml_backend_t      backend() const { return backend_; }

  private:
    bool same_device(const ggml_tensor * other) const;
    void set_from_host(size_t to, const void * values, size_t bytes);
    void copy_part(size_t to, const ggml_tensor * from, size_t offset, size_t bytes);
    void copy_columns(int64_t to, int64_t column, int64_t width, const result_rows & from, const int32_t * rows,
                      int32_t n);
    void copy_block(int64_t to, size_t at, int64_t width, const ggml_tensor * from, int64_t first, int64_t n);

    ggml_backend_t          backend_;
    ggml_context_ptr        tensors_;
    ggml_tensor *           rows_;
    ggml_backend_buffer_ptr buffer_;
};

} // namespace draftwood
