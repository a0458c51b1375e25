// The C line of experts that are read ahead: draftwood-experts.h.

#include "capi/capi.h"
#include "draftwood-experts.h"
#include "experts/readahead.h"

struct dw_expert_readahead {
    draftwood::expert_readahead impl;
};

using namespace draftwood;

dw_status dw_expert_readahead_new(const llama_model * model, dw_expert_readahead ** readahead) {
    return guard([&] {
        require("dw_expert_readahead_new", model, readahead);
        *readahead = nullptr;
        *readahead = new dw_expert_readahead{ expert_readahead(model) };
        return DW_OK;
    });
}

void dw_expert_readahead_free(dw_expert_readahead * readahead) {
    delete readahead;
}

dw_status dw_expert_readahead_get_stats(const dw_expert_readahead * readahead, dw_readahead_stats * stats) {
    return guard([&] {
        require("dw_expert_readahead_get_stats", readahead, stats);
        require_layout("dw_readahead_stats", *stats);
        const expert_readahead::counters now = readahead->impl.look();
        *stats = { sizeof(*stats),     now.n_layers,   now.n_steps,     now.n_experts_used,
                   now.n_experts_read, now.bytes_read, now.expert_bytes };
        return DW_OK;
    });
}
