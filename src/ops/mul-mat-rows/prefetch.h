// Test: none changes a result; bench/stock_cpu.py and verify_cpu.py show what it brings.

#pragma once

namespace dw {

// Ask for a cache line of weights ahead of its use, into the second cache. The first cache can wait for few lines at a
// time, and loads need those: on a Zen 4 core this brings 18 GB/s of Q6_K where prefetching into it brings 12.
inline void prefetch_line(const void * from) {
    __builtin_prefetch(from, /*rw*/ 0, /*locality*/ 2);
}

} // namespace dw
