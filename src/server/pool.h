// The pool of experts of llama-server's model: --expert-vram, --expert-heat, --expert-guess. All experts lie in host
// memory, as many as fit into --expert-vram in slots on the card. Patched lines of server-context.cpp call this. It
// works with any --spec-type and for any number of slots: their contexts decode one after another. What fits is decided
// as python/draftwood/load/experts.py does. Must not know: slots, rounds. Test: tests/server/test_pool.py.

#pragma once

#include "server/pool_spec.h"

#include "draftwood-experts.h"

#include <memory>
#include <string>

struct common_params;

namespace draftwood {

class model_pool {
  public:
    // Makes the pool that `params` ask for, and has their model loaded into it. No pool is made if nobody asks for one,
    // or all experts fit. Token embeddings go where placement.h says. Returns false, and logs why, if there cannot be a
    // pool. The model of an earlier call must be gone.
    bool make(common_params & params);

    void loaded(const llama_model * model) const; // nullptr: says so if memory was refused
    void keep_heat() const;                       // before the model goes

    // for /metrics; "" without a pool
    std::string metrics() const;

  private:
    void        make_or_throw(common_params & params);
    void        place(common_params & params);
    std::string warm() const; // why it does not begin with the heat file; "" if it does

    struct deleter {
        void operator()(dw_expert_pool * pool) const { dw_expert_pool_free(pool); }
    };
    std::unique_ptr<dw_expert_pool, deleter> pool_;
    std::string                              pattern_; // of the tensors in it
    std::string                              heat_file_;
    dw_model_info                            info_{};
};

} // namespace draftwood
