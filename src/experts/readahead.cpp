// See readahead.h.

#include "experts/readahead.h"

#include "experts/names.h"
#include "ggml-backend.h"
#include "llama/facts.h"
#include "llama/status.h"
#include "ops/door/node.h"
#include "ops/door/registry.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#if defined(__linux__)
#include <fcntl.h>
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace draftwood {

namespace op = dw::expert_readahead;

namespace {

// Graphs know tensors, not models.
struct known_layers {
    std::atomic<int32_t>                                       n{ 0 }; // most processes have none: no lock for these
    std::mutex                                                 mutex;
    std::unordered_map<const ggml_tensor *, const op::layer *> by_tensor;
};

known_layers & known() {
    static known_layers all;
    return all;
}

const op::layer * layer_with(const ggml_tensor * weights) {
    known_layers & all = known();
    if (all.n == 0) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto                        found = all.by_tensor.find(weights);
    return found == all.by_tensor.end() ? nullptr : found->second;
}

void forget(const std::vector<const ggml_tensor *> & tensors) {
    known_layers &                    all = known();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const ggml_tensor * each : tensors) {
        all.by_tensor.erase(each);
    }
    all.n = (int32_t) all.by_tensor.size();
}

#if defined(__linux__)

bool is_mapped(const ggml_tensor * tensor) {
    return tensor->buffer && std::strcmp(ggml_backend_buffer_name(tensor->buffer), "CPU_Mapped") == 0;
}

// the file that is mapped at this address; "": none
std::string file_at(const void * address) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        unsigned long first = 0, last = 0;
        int           path_at = 0;
        std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %*s %n", &first, &last, &path_at);
        if (path_at > 0 && first <= (uintptr_t) address && (uintptr_t) address < last) {
            return line.substr((size_t) path_at);
        }
    }
    return "";
}

// Linux says which pages of a file are in memory to its owner and to those who may write it. To others it says: all.
bool may_look(const void * address) {
    const std::string path = file_at(address);
    struct stat       facts;
    if (path.empty() || stat(path.c_str(), &facts) != 0) {
        return false;
    }
    return facts.st_uid == geteuid() || faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
}

#else

bool is_mapped(const ggml_tensor *) {
    return false;
}

bool may_look(const void *) {
    return false;
}

#endif

// -1: no tensor of experts, or none in a mapped file
int32_t mapped_layer(const ggml_tensor * tensor) {
    const bool fits =
        names_experts(tensor) && tensor->ne[2] <= op::max_experts && tensor->ne[3] == 1 && ggml_is_contiguous(tensor);
    return fits && is_mapped(tensor) ? layer_named(tensor) : -1;
}

} // namespace

expert_readahead::expert_readahead(const llama_model * model) {
    std::unordered_map<const ggml_tensor *, const layer *> found;
    for (const ggml_tensor * each : tensors_of(model)) {
        if (const layer * of = add(each)) {
            found.emplace(each, of);
            tensors_.push_back(each);
        }
    }
    known_layers &                    all = known();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (!tensors_.empty() && all.by_tensor.count(tensors_[0]) > 0) {
        fail(DW_ERR_ARGUMENT, "the model's experts are read ahead already; expected one dw_expert_readahead a model");
    }
    found.insert(all.by_tensor.begin(), all.by_tensor.end());
    all.by_tensor.swap(found); // nothing throws from here on
    all.n = (int32_t) all.by_tensor.size();
}

const expert_readahead::layer * expert_readahead::add(const ggml_tensor * tensor) {
    const int32_t il = mapped_layer(tensor);
    if (il < 0) {
        return nullptr;
    }
    std::unique_ptr<layer> & of = layers_[il];
    if (!of) {
        of            = std::make_unique<layer>();
        of->n_experts = (int32_t) tensor->ne[2];
        of->may_look  = may_look(tensor->data);
    }
    if (of->n_parts == op::max_parts || of->n_experts != tensor->ne[2]) {
        return nullptr;
    }
    of->parts[of->n_parts++] = { (char *) tensor->data, (int64_t) tensor->nb[2] };
    return of.get();
}

expert_readahead::~expert_readahead() {
    forget(tensors_);
}

expert_readahead::counters expert_readahead::look() const {
    counters sum{};
    for (const auto & [il, each] : layers_) {
        sum.n_layers++;
        sum.n_steps = std::max<int64_t>(sum.n_steps, each->n_steps);
        sum.n_experts_used += each->n_experts_used;
        sum.n_experts_read += each->n_experts_read;
        sum.bytes_read += each->bytes_read;
        for (int32_t p = 0; p < each->n_parts; ++p) {
            sum.expert_bytes += each->n_experts * each->parts[p].stride;
        }
    }
    return sum;
}

ggml_tensor * read_ahead(ggml_context * ctx, ggml_cgraph * graph, const ggml_tensor * weights, ggml_tensor * ids) {
    const op::layer * of = layer_with(weights);
    if (!of) {
        return ids;
    }
    const int     n_nodes = ggml_graph_n_nodes(graph);
    ggml_tensor * newest  = n_nodes > 0 ? ggml_graph_node(graph, n_nodes - 1) : nullptr;
    const bool    is_it =
        newest && dw::is_node_of(newest, op::signature) && newest->src[op::ids] == ids && dw::layer_of(newest) == of;
    if (is_it) { // another product of the layer asked for it
        return newest;
    }
    ggml_tensor * asked = dw::new_node(ctx, find_op(cpu_device(), op::signature), { ids->ne[0], ids->ne[1], 1, 1 },
                                       { { op::ids, ids } }, of, GGML_TYPE_I32);
    ggml_build_forward_expand(graph, asked);
    return asked;
}

} // namespace draftwood
