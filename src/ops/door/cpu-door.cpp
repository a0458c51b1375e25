// See cpu-door.h.

#include "ops/door/cpu-door.h"

#include "ggml-impl.h"
#include "ops/door/custom-op.h"
#include "ops/expert-readahead/expert-readahead.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/slot-memory.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/top-rows/top-rows.h"
#include "ops/tree-attention/tree-attention.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <cstring>

namespace {

const dw::op_descriptor * const ops[] = {
    &dw::tree_conv_windows::on_cpu,
    &dw::tree_delta_net::on_cpu,
    &dw::tree_commit_state::on_cpu,
    &dw::tree_commit_conv::on_cpu,
    &dw::tree_scores::on_cpu,
    &dw::tree_values::on_cpu,
    &dw::tree_commit_rows::on_cpu,
    &dw::tree_commit_columns::on_cpu,
    &dw::top_rows::on_cpu,
    &dw::expert_slots::on_cpu,
    &dw::expert_slots::ready_on_cpu,
    &dw::expert_slots::guess_on_cpu,
    &dw::expert_readahead::on_cpu,
    &dw::layer_parts::experts::on_cpu,
    &dw::layer_parts::choice::on_cpu,
    &dw::layer_parts::chosen_experts::on_cpu,
    &dw::layer_parts::feed_forward::on_cpu,
    &dw::layer_parts::norm_of_rows::on_cpu,
    &dw::layer_parts::product_of_rows::on_cpu,
    &dw::layer_parts::delta_inputs::on_cpu,
    &dw::layer_parts::attention_inputs::on_cpu,
    &dw::layer_parts::draft_input::on_cpu,
    &dw::layer_parts::delta_front::on_cpu,
    &dw::layer_parts::delta_heads::on_cpu,
    &dw::layer_parts::delta_tree::on_cpu,
    &dw::layer_parts::delta_step::on_cpu,
    &dw::layer_parts::delta_output::on_cpu,
    &dw::layer_parts::attention_heads::on_cpu,
    &dw::layer_parts::flash_attention::on_cpu,
    &dw::layer_parts::attention_output::on_cpu,
};

static_assert(sizeof(ggml_custom_op_params) <= dw::layer_at, "the layer pointer lies behind ggml's parameters");
static_assert(dw::layer_at + sizeof(void *) <= GGML_MAX_OP_PARAMS, "the layer pointer fits");

} // namespace

void * dw_cpu_find(const char * name) {
    for (const dw::op_descriptor * op : ops) {
        if (std::strcmp(op->signature.name, name) == 0) {
            return const_cast<dw::op_descriptor *>(op);
        }
    }
    if (std::strcmp(name, dw::slot_memory_name) == 0) {
        return const_cast<dw::slot_memory *>(&dw::slot_memory_on_cpu);
    }
    return std::strcmp(name, "dw_top_rows_layout") == 0 ? (void *) dw::top_rows::layout_of : nullptr;
}
