// What a DFlash drafter makes of its target's features in llama.cpp's graph, keys and values of all its layers at once:
// see fuser.h.

#include "decode/cached_heads.h"
#include "decode/fuser.h"
#include "decode/pattern.h"

#include <algorithm>

namespace draftwood {

namespace {

// A layer's keys and values, and where they go.
struct layer_of_features {
    ggml_tensor * k = nullptr, *v = nullptr; // products
    ggml_tensor * shaped = nullptr; // values by head, for the cache alone: it becomes the node that writes both
    turned_heads  turned;
    cache_write   keys, values;

    static layer_of_features of(ggml_tensor * k, ggml_tensor * v, const graph_edit & edit) {
        layer_of_features found{ k, v, as(edit.only_user(v), GGML_OP_RESHAPE), turned_heads::of(k, edit), {}, {} };
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

// The layers whose keys and values these are; 0: another graph. Keys stand for queries, too, which nobody reads.
int fuser::feature_keys(ggml_tensor * scaled) {
    const norm normal   = norm::of(scaled);
    const auto products = edit_.users(scaled);
    if (!normal || products.empty() || products.size() % 2 != 0 || !has_few_rows(scaled)) {
        return 0;
    }
    std::vector<layer_of_features> layers;
    std::vector<ggml_tensor *>     heads;
    namespace op = parts::attention_heads;
    for (size_t i = 0; i < products.size(); i += 2) {
        ggml_tensor *           k = products[i], *v = products[i + 1];
        const layer_of_features of = layer_of_features::of(k, v, edit_);
        if (!of || !weights_times(k, scaled) || !weights_times(v, scaled) ||
            !edit_.is_closed({ of.shaped, of.keys.node, of.values.node }, of.inputs())) {
            return 0;
        }
        layers.push_back(of);
        const ggml_tensor * shape = of.shaped;
        heads.push_back(made(op::signature, { shape->ne[0], shape->ne[1], shape->ne[2], 1 },
                             { { op::q, of.turned.heads },
                               { op::q_norm, of.turned.weights },
                               { op::k, of.turned.heads },
                               { op::k_norm, of.turned.weights },
                               { op::v, v },
                               { op::positions, of.turned.positions },
                               { op::k_cells, of.keys.cells },
                               { op::k_cache, of.keys.cache },
                               { op::v_cells, of.values.cells },
                               { op::v_cache, of.values.cache } },
                             { of.turned.weights, owner_of(of.keys.cache), owner_of(of.values.cache) },
                             of.turned.with));
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

// Products of one normalised input, in as few nodes as there can be; false: nothing is changed
bool fuser::split_products(const norm & normal, const std::vector<ggml_tensor *> & products) {
    constexpr size_t                        most = parts::attention_inputs::most_weights;
    std::vector<std::vector<ggml_tensor *>> some;
    std::vector<ggml_tensor *>              nodes;
    for (size_t i = 0; i < products.size(); i += most) {
        some.emplace_back(products.begin() + i, products.begin() + std::min(i + most, products.size()));
        nodes.push_back(made_inputs(normal, some.back()));
    }
    const auto can = [&](const ggml_tensor * each) { return ggml_is_contiguous(each) && !edit_.is_held(each); };
    if (std::find(nodes.begin(), nodes.end(), nullptr) != nodes.end() ||
        !std::all_of(products.begin(), products.end(), can) || !edit_.is_closed(products, { normal.x })) {
        return false;
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
        edit_.split(some[i], {}, { normal.x }, nodes[i]);
    }
    return true;
}

} // namespace draftwood
