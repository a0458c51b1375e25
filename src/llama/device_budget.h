// Bytes that draftwood holds beside llama.cpp's own, on all devices and the host together, by who holds them. Tree
// state asks before it allocates. Drafter contexts and graphs are made by llama.cpp and counted when their size is
// known: a drafter over the limit is freed, graphs over it give way. Counts only: nothing is allocated here. Must not
// know: contexts, devices, rounds. Test: tests/model/engine/test_little_memory.py (a refusal leaves the memory as it
// was).

#pragma once

#include "llama/status.h"

#include <cstdint>
#include <utility>

namespace draftwood {

struct budget_share {
    const char * name;
    int64_t      limit = INT64_MAX; // bytes
    int64_t      held  = 0;

    bool has_room(int64_t n_bytes) const { return n_bytes <= limit - held; }
};

// One of these for each llama_model: all contexts on it share the devices.
struct device_budget {
    budget_share drafter{ "drafter contexts" };                    // their memory, compute buffers and short heads
    budget_share graphs{ "kept graphs", int64_t(512) << 20 };      // graph_store.h; the least recently used give way
    budget_share tree_state{ "factors of verified draft tokens" }; // tree_state.h

    int64_t held() const { return drafter.held + graphs.held + tree_state.held; }
};

// Bytes that are held for as long as this lives.
class budget_lease {
  public:
    budget_lease() = default;
    // Throws failure with DW_ERR_MEMORY if the share has no room. The share must outlive the lease.
    budget_lease(budget_share & share, int64_t n_bytes) :
        share_(&share),
        n_bytes_(n_bytes) {
        if (!share.has_room(n_bytes)) {
            fail(DW_ERR_MEMORY, "%lld bytes for %s; %lld of %lld are held", (long long) n_bytes, share.name,
                 (long long) share.held, (long long) share.limit);
        }
        share.held += n_bytes;
    }
    ~budget_lease() { give_back(); }
    budget_lease(const budget_lease &)             = delete;
    budget_lease & operator=(const budget_lease &) = delete;
    budget_lease(budget_lease && other) noexcept :
        share_(std::exchange(other.share_, nullptr)),
        n_bytes_(other.n_bytes_) {}
    budget_lease & operator=(budget_lease && other) noexcept {
        give_back();
        share_   = std::exchange(other.share_, nullptr);
        n_bytes_ = other.n_bytes_;
        return *this;
    }

  private:
    void give_back() {
        if (share_) {
            share_->held -= n_bytes_;
        }
        share_ = nullptr;
    }

    budget_share * share_   = nullptr;
    int64_t        n_bytes_ = 0;
};

} // namespace draftwood
