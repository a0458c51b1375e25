// Fields of a GGUF's header: see gguf_fields.h.
//
// Source: load_hparams of llama-model.cpp and load_arch_hparams of models/qwen35.cpp, qwen35moe.cpp and dflash.cpp
// at the pin, with the GGML_ASSERTs there, in their graphs, in llama-vocab.cpp and in ggml's rope and norms.

#include "drafters/gguf_fields.h"

#include "drafters/gguf_attention.h"
#include "drafters/gguf_header.h"
#include "drafters/gguf_tensors.h"
#include "drafters/gguf_texts.h"
#include "drafters/gguf_values.h"
#include "llama/facts.h"
#include "llama/status.h"

#include <algorithm>
#include <string>
#include <vector>

namespace draftwood {

namespace {

constexpr uint32_t any_size = 1u << 24; // far beyond any model's
constexpr uint32_t any      = INT32_MAX;

// a whole number, or one for each layer; names are without the architecture
struct field {
    const char * name;
    uint32_t     least;
    uint32_t     most;
    const char * most_of     = nullptr; // a field in place of `most`
    const char * divides     = nullptr; // a field that is a multiple of this one
    uint32_t     multiple_of = 1;
};

struct real {
    const char * name;
    double       least;
    double       most;
};

// of every architecture
const field every_model[] = {
    { "block_count", 1, 512 }, // LLAMA_MAX_LAYERS
    { "nextn_predict_layers", 0, 0, "block_count" },
    { "expert_count", 0, 1024 }, // LLAMA_MAX_EXPERTS
    { "expert_used_count", 0, 0, "expert_count" },
};

// the same: ggml's norms assert them
const real epsilons[] = {
    { "attention.layer_norm_rms_epsilon", 0.0, 1.0 },
    { "attention.layer_norm_epsilon", 0.0, 1.0 },
    { "attention.group_norm_epsilon", 0.0, 1.0 },
};

// of qwen35, qwen35moe and dflash
const field attention[] = {
    { "context_length", 1, any },
    { "embedding_length", 1, any_size },
    { "feed_forward_length", 0, any_size },
    { "attention.head_count", 1, any_size },
    { "attention.head_count_kv", 1, 0, "attention.head_count", "attention.head_count" },
    { key_length, 2, any_size, nullptr, nullptr, 2 },
    { value_length, 2, any_size, nullptr, nullptr, 2 },
    { "rope.dimension_count", 2, 0, key_length, nullptr, 2 },
    { "rope.scaling.original_context_length", 1, any },
};

const real reals[] = {
    { "rope.freq_base", 1e-6, 1e30 },         { "rope.scaling.factor", 0.0, 1e9 },
    { "rope.scaling.attn_factor", 0.0, 1e9 }, { "rope.scaling.yarn_log_multiplier", -1e9, 1e9 },
    { "embedding_scale", -1e9, 1e9 },         { "attention.scale", 0.0, 1e9 },
    { "attention.value_scale", -1e9, 1e9 },   { "logit_scale", -1e9, 1e9 },
    { "final_logit_softcapping", 0.0, 1e9 },
};

// of qwen35 and qwen35moe
const field delta_net[] = {
    { "full_attention_interval", 1, any },
    { "ssm.conv_kernel", 2, 1024 },
    { "ssm.state_size", 1, any_size },
    { "ssm.time_step_rank", 1, any_size },
    { "ssm.group_count", 1, 0, "ssm.time_step_rank", "ssm.time_step_rank" },
};

const field experts[] = {
    { "expert_count", 1, 1024 },
    { "expert_used_count", 1, 0, "expert_count" },
    { "expert_feed_forward_length", 0, any_size },
    { "expert_shared_feed_forward_length", 0, any_size },
};

const char * const rope_scalings[] = { "none", "linear", "yarn", "longrope" }; // LLAMA_ROPE_SCALING_TYPES

class checker : gguf_values {
  public:
    using gguf_values::gguf_values;

    void run() const {
        if (is_absent("block_count")) {
            return; // no model: an adapter, say
        }
        if (architecture() == "qwen35moe") {
            for (const field & each : experts) {
                within(each);
            }
        }
        for (const field & each : every_model) {
            within(each);
        }
        for (const real & each : epsilons) {
            within(each);
        }
        if (architecture().rfind("hunyuan", 0) != 0) { // which drops a single expert
            expert_relations();
        }
        rope_scaling();
        if (is_qwen35(architecture()) || architecture() == "dflash") {
            ours();
        }
    }

  private:
    void within(const field & f) const {
        const field_limit most = f.most_of ? limit_of(f.most_of) : field_limit{ f.most, nullptr };
        const bool        each = values(f.name).size() > 1; // layers without attention may have no heads
        for (const uint32_t value : values(f.name)) {
            if (value > most.value || (value < f.least && !(each && value == 0))) {
                if (most.name && most.name != head_size && is_absent(most.name)) {
                    refuse(f.name, value, absent(most.name));
                }
                refuse(f.name, value,
                       std::to_string(f.least) + " to " + std::to_string(most.value) +
                           (most.name ? std::string(" (") + most.name + ")" : ""));
            }
            if (value % f.multiple_of != 0) {
                refuse(f.name, value, "a multiple of " + std::to_string(f.multiple_of));
            }
            if (f.divides && value != 0 && most_of(f.divides) % value != 0) {
                refuse(f.name, value,
                       std::string("a divisor of ") + f.divides + ", which is " + std::to_string(most_of(f.divides)));
            }
        }
    }

    void within(const real & r) const {
        float value;
        if (header().f32(key(r.name), value) && !(value >= r.least && value <= r.most)) { // nan is neither
            fail(DW_ERR_FILE, "%s: %s is %g; expected %g to %g", path(), key(r.name).c_str(), (double) value, r.least,
                 r.most);
        }
    }

    void expert_relations() const {
        const uint32_t n = most_of("expert_count"), groups = most_of("expert_group_count");
        const uint32_t used_groups = most_of("expert_group_used_count");
        if (n > 0 && most_of("expert_used_count") == 0) {
            refuse("expert_used_count", "0 or absent", "1 to " + std::to_string(n) + " (expert_count)");
        }
        if (groups > 0 && (groups >= n || n % groups != 0)) {
            refuse("expert_group_count", groups, "a divisor of expert_count, which is " + std::to_string(n));
        }
        if (groups > 1 && (used_groups == 0 || used_groups >= groups)) {
            refuse("expert_group_used_count", used_groups, "1 to " + std::to_string(groups - 1));
        }
    }

    void rope_scaling() const {
        const char * const name = "rope.scaling.type";
        const std::string  type = header().text(key(name));
        if (header().has_text(key(name)) &&
            std::find(std::begin(rope_scalings), std::end(rope_scalings), type) == std::end(rope_scalings)) {
            refuse(name, "'" + type + "'", "none, linear, yarn or longrope");
        }
    }

    void ours() const {
        require_sound_tensors(header(), path());
        for (const field & each : attention) {
            within(each);
        }
        for (const real & each : reals) {
            within(each);
        }
        require_sound_attention(*this);
        if (architecture() == "dflash") {
            within({ "rope.dimension_count_swa", 2, 0, key_length, nullptr, 2 });
            return;
        }
        for (const field & each : delta_net) {
            within(each);
        }
        inner_size();
        if (most_of("nextn_predict_layers") > 0 && most_of("nextn_predict_layers") >= most_of("block_count")) {
            refuse("nextn_predict_layers", most_of("nextn_predict_layers"),
                   "less than block_count, which is " + std::to_string(most_of("block_count")));
        }
    }

    void inner_size() const {
        const char * const factors[] = { "ssm.time_step_rank", "ssm.state_size" };
        const uint64_t     expected  = (uint64_t) most_of(factors[0]) * most_of(factors[1]);
        for (const uint32_t value : values("ssm.inner_size")) {
            for (const char * factor : factors) {
                if (is_absent(factor)) {
                    refuse("ssm.inner_size", value, absent(factor));
                }
            }
            if (value != expected) {
                refuse("ssm.inner_size", value, std::to_string(expected) + ", ssm.time_step_rank times ssm.state_size");
            }
        }
    }
};

} // namespace

void require_sound_fields(const gguf_header & header, const char * path) {
    require_sound_texts(header, path);
    checker(header, path).run();
}

} // namespace draftwood
