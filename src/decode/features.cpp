// What a DFlash drafter makes of its target's features in llama.cpp's graph: keys and values of all its layers at once.
// See fuser.h.

#include "decode/cached_heads.h"
#include "decode/fuser.h"
#include "decode/pattern.h"

#include <algorithm>

namespace draftwood {

namespace {

// A layer's keys and values, and where they go.
struct layer_of_features {
    ggml_tensor * k = nullptr, *v = nullptr; // products
    ggml_tensor * shaped     = nullptr; // values by head, for the cache alone: it becomes the node that writes both
    int32_t       v_hadamard = 0;
    turned_heads  turned;
    cache_write   keys, values;

    static layer_of_features of(ggml_tensor * k, ggml_tensor * v, const graph_edit & edit) {
        ggml_tensor *     shaped = as(edit.only_user(v), GGML_OP_RESHAPE);
        const hadamard    behind = hadamard::of(shaped, edit);
        layer_of_features found{ k, v, behind ? behind.result : shaped, behind.n, turned_heads::of(k, edit), {}, {} };
        found.keys      = found.turned ? cache_write::of(found.turned.result, edit) : cache_write{};
        found.values    = found.shaped ? cache_write::of(found.shaped, edit) : cache_write{};
        const bool fits = found.keys && found.values && ggml_are_same_shape(found.shaped, found.turned.result) &&
                          is_input(found.turned.positions) && is_input(found.keys.cells) &&
                          is_input(found.values.cells);
        return fits ? found : layer_of_features{};
    }
    explicit operator bool() const { return shaped != nullptr; }

    std::vector<const ggml_tensor *> inputs() const {
        return { turned.heads, v, turned.positions, keys.cells, values.cells, keys.cache, values.cache };
    }
    std::vector<ggml_tensor *> writes() const { return { keys.node, values.node }; }
};

} // namespace

// The number of layers whose keys and values these are; 0: another graph. All layers are fused or none, so all must be
// on one device. Keys stand for queries, too, which nobody reads.
int fuser::feature_keys(ggml_tensor * scaled) {
    const norm normal   = norm::of(scaled);
    const auto products = edit_.users(scaled);
    if (!normal || products.empty() || products.size() % 2 != 0 || !has_few_rows(scaled)) {
        return 0;
    }
    std::vector<layer_of_features> layers;
    std::vector<ggml_tensor *>     heads;
    for (size_t i = 0; i < products.size(); i += 2) {
        ggml_tensor *           k = products[i], *v = products[i + 1];
        const layer_of_features of = layer_of_features::of(k, v, edit_);
        if (!of || !weights_times(k, scaled) || !weights_times(v, scaled) ||
            !edit_.is_closed({ of.shaped, of.keys.node, of.values.node }, of.inputs())) {
            return 0;
        }
        layers.push_back(of);
        heads.push_back(made_heads(of.turned, of.turned, v, of.v_hadamard, of.shaped, of.keys, of.values));
    }
    const bool are_made = std::find(heads.begin(), heads.end(), nullptr) == heads.end();
    if (!are_made || !split_products(normal, { products.begin(), products.end() })) {
        return 0;
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        replace(layers[i].shaped, layers[i].inputs(), heads[i], layers[i].writes());
    }
    return (int) layers.size();
}

} // namespace draftwood
