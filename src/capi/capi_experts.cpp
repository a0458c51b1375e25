// The C line of the expert pool: draftwood-experts.h.

#include "capi/capi.h"
#include "draftwood-experts.h"
#include "draftwood-testing.h"
#include "experts/pool.h"

#include <algorithm>

struct dw_expert_pool {
    draftwood::expert_pool impl;
};

using namespace draftwood;

namespace {

constexpr int32_t most_slots = 1 << 20;

ggml_backend_dev_t device_named(const char * name) {
    ggml_backend_dev_t found = ggml_backend_dev_by_name(name);
    if (!found) {
        fail(DW_ERR_ARGUMENT, "there is no device %s; ggml's devices are CPU, CUDA0, CUDA1, ...", name);
    }
    return found;
}

expert_pool::seen layer_of(const dw_expert_pool & pool, int32_t il) {
    std::optional<expert_pool::seen> found = pool.impl.look(il);
    if (!found) {
        fail(DW_ERR_ARGUMENT, "layer %d has no experts in this pool, or no context was made yet", il);
    }
    return *found;
}

} // namespace

void dw_expert_params_init(dw_expert_params * params) {
    if (params) {
        *params = { sizeof(dw_expert_params), /*n_slots*/ 0, DW_EXPERTS_FREQUENCY, /*stage*/ 0, /*guess*/ 0, 0, "CPU" };
    }
}

dw_status dw_expert_pool_new(const dw_expert_params * params, dw_expert_pool ** pool) {
    return guard([&] {
        require("dw_expert_pool_new", params, pool);
        require_layout("dw_expert_params", *params);
        require("dw_expert_pool_new", params->device);
        if (params->n_slots < 0 || params->n_slots > most_slots) {
            fail(DW_ERR_ARGUMENT, "n_slots is %d; expected 0 to %d", params->n_slots, most_slots);
        }
        if (params->policy != DW_EXPERTS_FREQUENCY && params->policy != DW_EXPERTS_LRU) {
            fail(DW_ERR_ARGUMENT, "policy is %d; expected a dw_expert_policy", params->policy);
        }
        const auto policy =
            params->policy == DW_EXPERTS_LRU ? expert_pool::policy::lru : expert_pool::policy::frequency;
        *pool = nullptr;
        *pool = new dw_expert_pool{ { device_named(params->device), params->n_slots, policy, params->stage != 0,
                                      params->guess != 0 } };
        return DW_OK;
    });
}

void dw_expert_pool_free(dw_expert_pool * pool) {
    delete pool;
}

void * dw_expert_pool_buffer_type(dw_expert_pool * pool) {
    return pool ? pool->impl.buffer_type().get() : nullptr;
}

dw_status dw_expert_refused(const dw_expert_pool * pool, int64_t * n_bytes, bool * on_host) {
    return guard([&] {
        require("dw_expert_refused", pool, n_bytes, on_host);
        const auto & refused = pool->impl.buffer_type().refused();
        *n_bytes             = refused.n_bytes;
        *on_host             = refused.on_host;
        return DW_OK;
    });
}

dw_status dw_expert_limit_host(dw_expert_pool * pool, int64_t n_bytes) {
    return guard([&] {
        require("dw_expert_limit_host", pool);
        pool->impl.buffer_type().limit_host(n_bytes);
        return DW_OK;
    });
}

dw_status dw_expert_get_stats(const dw_expert_pool * pool, dw_expert_stats * stats) {
    return guard([&] {
        require("dw_expert_get_stats", pool, stats);
        require_layout("dw_expert_stats", *stats);
        dw_expert_stats sum{};
        sum.struct_size  = sizeof(sum);
        sum.host_bytes   = pool->impl.buffer_type().host_bytes();
        sum.device_bytes = pool->impl.buffer_type().device_bytes();
        sum.stage_bytes  = pool->impl.stage_bytes();
        sum.n_beside     = pool->impl.n_beside();
        for (const expert_pool::seen & each : pool->impl.look()) {
            sum.n_layers++;
            sum.n_experts += (int32_t) each.heat.size();
            sum.n_slots += each.n_slots;
            sum.n_steps = std::max(sum.n_steps, (int64_t) each.counted.n_steps);
            sum.n_hits += (int64_t) each.counted.n_hits;
            sum.n_misses += (int64_t) each.counted.n_misses;
            sum.n_in_place += (int64_t) each.counted.n_in_place;
            sum.n_guessed += (int64_t) each.counted.n_guessed;
            sum.n_right += (int64_t) each.counted.n_right;
            sum.n_late += (int64_t) each.counted.n_late;
            const uint64_t n_missed = each.counted.n_misses + each.counted.n_in_place + each.counted.n_guessed;
            sum.bytes_missed += (int64_t) n_missed * each.expert_bytes;
        }
        *stats = sum;
        return DW_OK;
    });
}

dw_status dw_expert_get_layer(const dw_expert_pool * pool, int32_t il, dw_expert_layer * layer) {
    return guard([&] {
        require("dw_expert_get_layer", pool, layer);
        require_layout("dw_expert_layer", *layer);
        const expert_pool::seen found = layer_of(*pool, il);
        dw_expert_layer         out{};
        out.struct_size  = sizeof(out);
        out.n_experts    = (int32_t) found.heat.size();
        out.n_slots      = found.n_slots;
        out.expert_bytes = found.expert_bytes;
        out.n_hits       = (int64_t) found.counted.n_hits;
        out.n_misses     = (int64_t) found.counted.n_misses;
        out.n_in_place   = (int64_t) found.counted.n_in_place;
        std::copy(found.heat.begin(), found.heat.end(), out.heat);
        std::copy(found.slot_of.begin(), found.slot_of.end(), out.slot_of);
        *layer = out;
        return DW_OK;
    });
}

dw_status dw_expert_set_heat(dw_expert_pool * pool, int32_t il, const uint32_t * heat, int32_t n_experts) {
    return guard([&] {
        require("dw_expert_set_heat", pool, heat);
        if (il < 0 || n_experts < 1 || n_experts > DW_MAX_EXPERTS) {
            fail(DW_ERR_ARGUMENT, "heat of %d experts of layer %d; expected a layer of 1 to %d experts", n_experts, il,
                 DW_MAX_EXPERTS);
        }
        pool->impl.set_heat(il, { heat, heat + n_experts });
        return DW_OK;
    });
}
