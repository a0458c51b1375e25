// See decode_outputs.h.

#include "llama/decode_outputs.h"

#include "llama-graph.h"

namespace draftwood {

const ggml_tensor * decode_outputs::hidden() const {
    return graph->get_h_nextn();
}

const ggml_tensor * decode_outputs::layer_input(int32_t il) const {
    return graph->get_layer_inp(il);
}

void decode_outputs::copy_kept() {
    for (const kept_output & each : kept) {
        ggml_backend_tensor_get(each.tensor, each.host, 0, each.bytes);
    }
    kept.clear();
}

} // namespace draftwood
