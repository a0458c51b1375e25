// The one place that decodes with a request. Must not know: rounds, drafters, samplers.
// Test: tests/model/engine/test_failures.py, test_tree_aborts.py.

#pragma once

#include "llama/attachment.h"
#include "llama/batch.h"

namespace draftwood {

// Decodes the batch's rows as `request` says. Returns llama_decode's value; throws what llama.cpp throws. However it
// ends, the context knows nothing of the request afterwards.
int32_t decode(attachment & attached, const decode_request & request, row_batch & batch);

// llama_synchronize counts what was computed (llama_perf_context), and would wait for a step that is queued behind
// another (decode_request::fork). So the first of two is counted here when it was computed, and the second one is taken
// out of the count when it is given up.
void count_step(attachment & attached) noexcept;
void uncount_step(attachment & attached) noexcept;
// A queued step failed: the context's one row is that of the decode before it again.
void restore_one_row(attachment & attached) noexcept;

// For benchmarks: computes the newest decode's graph n_times again. Returns microseconds of one time.
// Throws failure with DW_ERR_UNSUPPORTED if the decode took several graphs, with DW_ERR_DECODE if a time fails.
// The caller makes sure that the graph reads nothing that it wrote.
double replay(attachment & attached, int32_t n_times);

} // namespace draftwood
