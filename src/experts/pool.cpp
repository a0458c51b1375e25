// See pool.h.

#include "experts/pool.h"

#include "experts/names.h"
#include "llama/status.h"
#include "ops/expert-slots/policy.h"

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>

namespace draftwood {

namespace slots = dw::expert_slots;

namespace {

// experts, the hottest first
std::vector<int32_t> ranked(const std::vector<uint32_t> & heat) {
    std::vector<int32_t> order(heat.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return heat[a] > heat[b]; });
    return order;
}

bool are_one_layer(const std::vector<const ggml_tensor *> & parts) {
    const auto fits = [&](const ggml_tensor * each) {
        return each->ne[2] == parts[0]->ne[2] && each->ne[3] == 1 && ggml_is_contiguous(each);
    };
    return !parts.empty() && parts.size() <= slots::max_parts && parts[0]->ne[2] <= slots::max_experts &&
           std::all_of(parts.begin(), parts.end(), fits);
}

// the plane of a part that lies so
int32_t plane_for(slots::layer & of, const slot_layout & part) {
    const auto is_it = [&](int32_t plane) {
        return of.first_slots[plane] == part.first_slot && of.first_staged[plane] == part.first_staged;
    };
    int32_t plane = 0;
    while (plane < of.n_planes && !is_it(plane)) {
        ++plane;
    }
    of.first_slots[plane]  = part.first_slot;
    of.first_staged[plane] = part.first_staged;
    of.n_planes            = std::max(of.n_planes, plane + 1);
    return plane;
}

} // namespace

expert_pool::expert_pool(ggml_backend_dev_t device, int32_t n_slots, policy victims, bool has_stage, bool guesses) :
    type_(device, n_slots, has_stage),
    victims_(victims),
    guesses_(guesses),
    has_stage_(has_stage) {
    type_.owner = this;
}

expert_pool::~expert_pool() {
    model_goes();
}

void expert_pool::model_goes() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & [il, each] : layers_) {
        type_.memory().free(type_.device_number(), each->layer.state);
    }
    layers_.clear();
    free_stage();
    type_.memory().free_streams(type_.device_number(), copies_);
    copies_  = nullptr;
    entered_ = false;
}

int64_t expert_pool::stage_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stage_bytes_;
}

void expert_pool::free_stage() noexcept {
    for (void * memory : staged_memory_) {
        type_.memory().destroy(type_.device_number(), memory);
    }
    staged_memory_.clear();
    type_.memory().free_stage(type_.device_number(), stage_);
    stage_       = nullptr;
    stage_bytes_ = 0;
}

expert_pool * expert_pool::of(const ggml_tensor * tensor) noexcept {
    slot_buffer_type * type = slot_buffer_type::of(tensor);
    return type ? type->owner : nullptr;
}

void expert_pool::set_heat(int32_t il, std::vector<uint32_t> heat) {
    const std::lock_guard<std::mutex> lock(mutex_);
    heat_[il] = std::move(heat);
}

expert_pool::place expert_pool::place_of(const ggml_tensor * tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!entered_) {
        enter();
    }
    const auto found = layers_.find(layer_named(tensor));
    if (found == layers_.end()) {
        return { nullptr, nullptr };
    }
    const std::vector<const ggml_tensor *> & tensors = found->second->tensors;
    const size_t part = (size_t) (std::find(tensors.begin(), tensors.end(), tensor) - tensors.begin());
    if (part == tensors.size()) {
        return { nullptr, nullptr };
    }
    return { &found->second->layer, &found->second->layer.parts[part] };
}

void expert_pool::enter() {
    entered_ = true;
    for (const ggml_tensor * each : type_.tensors()) {
        const int32_t il = layer_named(each);
        if (il < 0 || layers_.count(il) > 0) {
            continue;
        }
        if (std::unique_ptr<held> made = make_layer(il)) {
            layers_.emplace(il, std::move(made));
        }
    }
    if (guesses_) {
        copies_ = type_.memory().make_streams(type_.device_number()); // nullptr: all runs in the step's queue
    }
    const slots::layer * next = nullptr;
    for (auto each = layers_.rbegin(); each != layers_.rend(); ++each) {
        slots::layer & of = each->second->layer;
        of.copies         = copies_;
        of.next           = next;
        next              = &of;
    }
    if (has_stage_) {
        make_stage();
    }
}

void expert_pool::computes_beside(const slots::layer & of) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & [il, each] : layers_) {
        each->computes_beside = each->computes_beside || &each->layer == &of;
    }
}

int32_t expert_pool::n_beside() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return (int32_t) std::count_if(layers_.begin(), layers_.end(),
                                   [](const auto & each) { return each.second->computes_beside; });
}

// Without memory for it, prompts read their experts in place.
void expert_pool::make_stage() {
    stage_ = type_.memory().make_stage(type_.device_number());
    if (!stage_ || !map_stage()) {
        free_stage(); // what is mapped stays with the buffer and is never read
        return;
    }
    for (const auto & [il, each] : layers_) {
        each->layer.staged = stage_;
    }
}

// Layers take turns in two places. A place has a piece for each part, as large as the largest layer's.
bool expert_pool::map_stage() {
    std::array<std::array<size_t, slots::max_parts>, 2> sizes{};
    int32_t                                             turn = 0;
    for (auto & [il, each] : layers_) {
        each->layer.place = turn++ % 2;
        for (size_t p = 0; p < each->tensors.size(); ++p) {
            size_t & size = sizes[each->layer.place][p];
            size          = std::max(size, type_.layout(each->tensors[p]).staged_bytes);
        }
    }
    std::array<std::array<void *, slots::max_parts>, 2> memory{};
    for (int32_t place = 0; place < 2; ++place) {
        for (int32_t p = 0; p < slots::max_parts && sizes[place][p] > 0; ++p) {
            memory[place][p] = type_.memory().create(type_.device_number(), sizes[place][p]);
            if (!memory[place][p]) {
                return false;
            }
            staged_memory_.push_back(memory[place][p]);
            stage_bytes_ += (int64_t) sizes[place][p];
        }
    }
    for (auto & [il, each] : layers_) {
        for (size_t p = 0; p < each->tensors.size(); ++p) {
            if (!type_.map_staged(each->tensors[p], memory[each->layer.place][p])) {
                return false;
            }
        }
    }
    return true;
}

std::unique_ptr<expert_pool::held> expert_pool::make_layer(int32_t il) {
    auto made = std::make_unique<held>();
    for (const ggml_tensor * each : type_.tensors()) {
        if (layer_named(each) == il) {
            made->tensors.push_back(each);
        }
    }
    if (!are_one_layer(made->tensors)) {
        return nullptr;
    }
    slots::layer & of = made->layer;
    of                = {};
    of.n_experts      = (int32_t) made->tensors[0]->ne[2];
    of.victims        = victims_;
    for (const ggml_tensor * each : made->tensors) {
        const slot_layout found = type_.layout(each);
        of.n_slots              = found.n_slots;
        of.parts[of.n_parts++]  = { (char *) each->data, found.stride, plane_for(of, found) };
    }
    std::vector<uint32_t> heat = heat_[il];
    heat.resize(of.n_experts);
    const std::vector<int32_t> order = ranked(heat);
    const auto                 first = std::make_unique<slots::table>();
    for (int32_t rank = 0; rank < of.n_experts; ++rank) {
        first->entries[order[rank]] = slots::initial(rank, of.n_slots, heat[order[rank]]);
    }
    of.state = (slots::table *) type_.memory().allocate(type_.device_number(), sizeof(slots::table));
    if (!of.state || !fill_slots(of, *first)) {
        type_.memory().free(type_.device_number(), of.state);
        return nullptr;
    }
    return made;
}

bool expert_pool::fill_slots(const slots::layer & of, const slots::table & first) const {
    const auto copy = [&](void * to, const void * from, size_t n_bytes) {
        return type_.memory().copy(type_.device_number(), to, from, n_bytes);
    };
    for (int32_t e = 0, n = 1; e < of.n_experts; e += n) {
        const int32_t slot = first.entries[e].slot;
        n                  = 1;
        while (slot >= 0 && e + n < of.n_experts && first.entries[e + n].slot == slot + n) {
            ++n; // neighbours there and here: one copy
        }
        for (int32_t p = 0; p < of.n_parts && slot >= 0; ++p) {
            const slots::part & part = of.parts[p];
            if (!copy(part.base + of.slot_offset(part, slot), part.base + e * part.stride,
                      (size_t) (n * part.stride))) {
                return false;
            }
        }
    }
    return copy(of.state, &first, sizeof(first));
}

expert_pool::seen expert_pool::read(int32_t il, const held & layer) const {
    const slots::layer & of    = layer.layer;
    const auto           table = std::make_unique<slots::table>();
    const slots::table & now   = *table;
    if (!type_.memory().copy(type_.device_number(), table.get(), of.state, sizeof(now))) {
        fail(DW_ERR_INTERNAL, "the table of layer %d could not be read", il);
    }
    seen found{ il, of.n_slots, 0, now.counted, {}, {} };
    for (int32_t p = 0; p < of.n_parts; ++p) {
        found.expert_bytes += of.parts[p].stride;
    }
    for (int32_t e = 0; e < of.n_experts; ++e) {
        found.heat.push_back(slots::heat_at(now.entries[e], slots::epoch_of(now.step)));
        found.slot_of.push_back(now.entries[e].slot);
    }
    return found;
}

std::vector<expert_pool::seen> expert_pool::look() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<seen>                 found;
    for (const auto & [il, each] : layers_) {
        found.push_back(read(il, *each));
    }
    return found;
}

std::optional<expert_pool::seen> expert_pool::look(int32_t il) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        found = layers_.find(il);
    return found == layers_.end() ? std::nullopt : std::optional(read(il, *found->second));
}

} // namespace draftwood
