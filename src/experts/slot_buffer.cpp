// See slot_buffer.h.

#include "experts/slot_buffer.h"

#include "experts/names.h"
#include "experts/pool.h"
#include "llama/status.h"
#include "ops/door/registry.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

namespace draftwood {

namespace {

constexpr size_t least_tail = 512; // bytes behind the last slot: MMQ reads whole tiles

bool is_part(const ggml_tensor * tensor) {
    return tensor->ne[2] > 1 && names_experts(tensor);
}

size_t padded(size_t n_bytes, size_t page) {
    return (n_bytes + page - 1) / page * page;
}

// One range of addresses; its tensors' parts are mapped as llama.cpp places them.
struct slot_buffer {
    slot_buffer_type & type;
    char *             base;
    size_t             n_bytes;

    struct mapping {
        char * at;
        size_t n_bytes;
    };

    std::vector<mapping> mapped;

    slot_buffer(slot_buffer_type & of, void * at, size_t size) :
        type(of),
        base((char *) at),
        n_bytes(size) {}

    ~slot_buffer() {
        type.freed(base, n_bytes);
        for (const mapping & each : mapped) {
            type.memory().unmap(type.device_number(), each.at, each.n_bytes);
        }
        type.memory().release(type.device_number(), base, n_bytes);
    }

    bool map(ggml_tensor * tensor) {
        const slot_layout of     = type.layout(tensor);
        char *            host   = (char *) tensor->data;
        char *            device = host + of.host_bytes;
        mapped.reserve(mapped.size() + 2);
        if (!type.may_map_host(of.host_bytes) || !type.memory().map_host(type.device_number(), host, of.host_bytes)) {
            type.refuse(of.host_bytes, /*on_host*/ true);
            return false;
        }
        mapped.push_back({ host, of.host_bytes });
        if (!type.memory().map_device(type.device_number(), device, of.device_bytes)) {
            type.refuse(of.device_bytes, /*on_host*/ false);
            return false;
        }
        mapped.push_back({ device, of.device_bytes });
        type.mapped(tensor);
        return true;
    }

    bool map_staged(char * at, size_t n, void * shared) {
        mapped.reserve(mapped.size() + 1);
        if (!type.memory().map_shared(type.device_number(), at, n, shared)) {
            return false;
        }
        mapped.push_back({ at, n });
        return true;
    }
};

slot_buffer & of(ggml_backend_buffer_t buffer) {
    return *(slot_buffer *) buffer->context;
}

void free_buffer(ggml_backend_buffer_t buffer) {
    delete &of(buffer);
}

void * base_of(ggml_backend_buffer_t buffer) {
    return of(buffer).base;
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    try {
        return of(buffer).map(tensor) ? GGML_STATUS_SUCCESS : GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception &) {
        return GGML_STATUS_ALLOC_FAILED;
    }
}

// The experts' half is host memory on every device.
void fill_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset((char *) tensor->data + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy((char *) tensor->data + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, (const char *) tensor->data + offset, size);
}

void clear(ggml_backend_buffer_t, uint8_t) {} // weights; mapped memory begins with zeros

const ggml_backend_buffer_i buffer_interface = {
    free_buffer, base_of, init_tensor, fill_tensor, set_tensor, get_tensor, nullptr, nullptr, nullptr, clear, nullptr,
};

const dw::slot_memory & memory_of(ggml_backend_dev_t device) {
    void * found = find_in_registry(device, dw::slot_memory_name);
    if (!found) {
        fail(DW_ERR_UNSUPPORTED, "the device %s has no expert slots; CPUs and CUDA cards of this library have",
             ggml_backend_dev_name(device));
    }
    return *(const dw::slot_memory *) found;
}

} // namespace

slot_buffer_type::slot_buffer_type(ggml_backend_dev_t device, int32_t n_slots, bool has_stage) :
    context_{ 0, std::string(ggml_backend_dev_name(device)) + "_experts", this },
    memory_(memory_of(device)),
    n_slots_(n_slots),
    has_stage_(has_stage && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU),
    type_(*ggml_backend_dev_buffer_type(device)) {
    const bool on_cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    if (!on_cpu) {
        context_.device = ((const type_context *) type_.context)->device;
    }
    if (const char * why = memory_.refusal(context_.device)) {
        fail(DW_ERR_UNSUPPORTED, "%s cannot hold a part of the experts: %s", ggml_backend_dev_name(device), why);
    }
    // llama.cpp tells types by their names. ggml-cuda knows by the function what its kernels can read; that one takes
    // the name from the context, too.
    type_.iface.get_name       = on_cpu ? name : type_.iface.get_name;
    type_.iface.alloc_buffer   = allocate;
    type_.iface.get_alignment  = alignment;
    type_.iface.get_max_size   = nullptr;
    type_.iface.get_alloc_size = alloc_size;
    type_.device               = device;
    type_.context              = &context_;
}

slot_buffer_type * slot_buffer_type::of(const ggml_tensor * tensor) noexcept {
    const bool ours = tensor && tensor->buffer && tensor->buffer->iface.free_buffer == free_buffer;
    return ours ? &of(tensor->buffer->buft) : nullptr;
}

slot_layout slot_buffer_type::layout(const ggml_tensor * tensor) const {
    ggml_backend_buffer_type_t theirs = ggml_backend_dev_buffer_type(device());
    const size_t               page   = memory_.page(device_number());
    const size_t               tail   = ggml_backend_buft_get_alloc_size(theirs, tensor) - ggml_nbytes(tensor);

    const bool has_slots = is_part(tensor);

    slot_layout found;
    found.stride       = (int64_t) tensor->nb[2];
    found.n_slots      = has_slots ? (int32_t) std::min<int64_t>(n_slots_, tensor->ne[2]) : 0;
    found.host_bytes   = padded(ggml_nbytes(tensor), page);
    found.first_slot   = (int32_t) ((found.host_bytes + found.stride - 1) / found.stride);
    const size_t end   = (size_t) (found.first_slot + found.n_slots) * found.stride + std::max(tail, least_tail);
    found.device_bytes = padded(end, page) - found.host_bytes;

    const size_t slots_end = found.host_bytes + found.device_bytes;
    const size_t rest      = std::max(tail, least_tail);
    found.first_staged     = (int32_t) ((slots_end + found.stride - 1) / found.stride);
    const size_t stage_end = (size_t) (found.first_staged + tensor->ne[2]) * found.stride + rest;
    found.staged_bytes     = has_stage_ && has_slots ? padded(stage_end, page) - slots_end : 0;
    return found;
}

void slot_buffer_type::mapped(ggml_tensor * tensor) {
    if (is_part(tensor)) {
        tensors_.push_back(tensor);
        data_.push_back((const char *) tensor->data);
    }
    const slot_layout of = layout(tensor);
    host_bytes_ += (int64_t) of.host_bytes;
    device_bytes_ += (int64_t) of.device_bytes;
}

const char * slot_buffer_type::name(ggml_backend_buffer_type_t type) {
    return of(type).context_.name.c_str();
}

size_t slot_buffer_type::alignment(ggml_backend_buffer_type_t type) {
    return of(type).memory_.page(of(type).device_number());
}

size_t slot_buffer_type::alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    const slot_layout found = of(type).layout(tensor);
    return found.host_bytes + found.device_bytes + found.staged_bytes;
}

void slot_buffer_type::freed(const char * base, size_t n_bytes) {
    const auto lay_there = [&](const char * each) { return each >= base && each < base + n_bytes; };
    if (std::any_of(data_.begin(), data_.end(), lay_there)) {
        owner->model_goes(); // of whose tensors some lay there
        tensors_.clear();
        data_.clear();
        host_bytes_ = device_bytes_ = 0;
    }
}

bool slot_buffer_type::map_staged(const ggml_tensor * tensor, void * shared) {
    const slot_layout found = layout(tensor);
    char *            at    = (char *) tensor->data + found.host_bytes + found.device_bytes;
    return draftwood::of(tensor->buffer).map_staged(at, found.staged_bytes, shared);
}

ggml_backend_buffer_t slot_buffer_type::allocate(ggml_backend_buffer_type_t type, size_t n_bytes) {
    slot_buffer_type & self = of(type);
    try {
        void * at = self.memory_.reserve(self.device_number(), n_bytes);
        if (!at) {
            self.refuse(n_bytes, /*on_host*/ true); // addresses: a limit of a process
            return nullptr;
        }
        auto buffer = std::make_unique<slot_buffer>(self, at, n_bytes);
        return ggml_backend_buffer_init(type, buffer_interface, buffer.release(), n_bytes);
    } catch (const std::exception &) {
        return nullptr;
    }
}

} // namespace draftwood
