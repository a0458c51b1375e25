// Prefetches weights. Results do not depend on it; bench/stock_cpu.py measures what it brings.

#pragma once

namespace dw {

// Request a cache line of weights ahead of its use, into the second-level cache. The first-level cache has few requests
// in flight at a time, and loads need those (Zen 4: bench/LOG.md).
inline void prefetch_line(const void * from) {
    __builtin_prefetch(from, /*rw*/ 0, /*locality*/ 2);
}

} // namespace dw
