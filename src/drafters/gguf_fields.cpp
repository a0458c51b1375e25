// Fields of a GGUF's header: see gguf_fields.h.
//
// Source: load_hparams of llama-model.cpp and load_arch_hparams of models/qwen35.cpp, qwen35moe.cpp and dflash.cpp
// at the pin, with the GGML_ASSERTs there, in their graphs, in llama-vocab.cpp and in ggml's rope and norms.

#include "drafters/gguf_fields.h"

#include "drafters/gguf_header.h"
#include "drafters/gguf_texts.h"
#include "llama/facts.h"
#include "llama/status.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <string_view>

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
    { "attention.key_length", 2, any_size, nullptr, nullptr, 2 },
    { "attention.value_length", 2, any_size, nullptr, nullptr, 2 },
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
    { "rope.dimension_count", 2, 0, "attention.key_length", nullptr, 2 },
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

// types that no weight has: llama.cpp loads them, and a product with them ends the process
const ggml_type no_weights[] = { GGML_TYPE_Q8_1, GGML_TYPE_Q8_K, GGML_TYPE_I8, GGML_TYPE_I16,
                                 GGML_TYPE_I32,  GGML_TYPE_I64,  GGML_TYPE_F64 };
// ends of names of tensors that ggml's CPU backend takes as f32 only
const char * const f32_only[] = { "norm.weight", ".bias", ".ssm_a", ".ssm_conv1d.weight" };

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

class checker {
  public:
    checker(const gguf_header & header, const char * path) :
        header_(header),
        path_(path),
        arch_(header.architecture()),
        prefix_(arch_ + ".") {}

    void run() const {
        if (!header_.has_key(prefix_ + "block_count")) {
            return; // no model: an adapter, say
        }
        if (arch_ == "qwen35moe") {
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
        if (arch_.rfind("hunyuan", 0) != 0) { // which drops a single expert
            expert_relations();
        }
        rope_scaling();
        if (is_qwen35(arch_) || arch_ == "dflash") {
            ours();
        }
    }

  private:
    // a field's values: one, one for each layer, or none if it is absent or of another type
    std::vector<uint32_t> values(const char * name) const {
        const std::string key = prefix_ + name;
        if (header_.has_u32(key)) {
            return { header_.u32(key) };
        }
        const std::vector<int32_t> numbers = header_.numbers(key);
        return { numbers.begin(), numbers.end() };
    }

    uint32_t most_of(const char * name) const {
        const std::vector<uint32_t> all = values(name);
        return all.empty() ? 0 : *std::max_element(all.begin(), all.end());
    }

    void within(const field & f) const {
        const uint32_t most = f.most_of ? most_of(f.most_of) : f.most;
        const bool     each = values(f.name).size() > 1; // layers without attention may have no heads
        for (const uint32_t value : values(f.name)) {
            if (value > most || (value < f.least && !(each && value == 0))) {
                fail(DW_ERR_FILE, "%s: %s%s is %u; expected %u to %u%s%s%s", path_, prefix_.c_str(), f.name, value,
                     f.least, most, f.most_of ? " (" : "", f.most_of ? f.most_of : "", f.most_of ? ")" : "");
            }
            if (value % f.multiple_of != 0) {
                fail(DW_ERR_FILE, "%s: %s%s is %u; expected a multiple of %u", path_, prefix_.c_str(), f.name, value,
                     f.multiple_of);
            }
            if (f.divides && value != 0 && most_of(f.divides) % value != 0) {
                fail(DW_ERR_FILE, "%s: %s%s is %u; expected a divisor of %s, which is %u", path_, prefix_.c_str(),
                     f.name, value, f.divides, most_of(f.divides));
            }
        }
    }

    void within(const real & r) const {
        const std::string key = prefix_ + r.name;
        float             value;
        if (header_.f32(key, value) && !(value >= r.least && value <= r.most)) { // nan is neither
            fail(DW_ERR_FILE, "%s: %s is %g; expected %g to %g", path_, key.c_str(), (double) value, r.least, r.most);
        }
    }

    void expert_relations() const {
        const uint32_t n = most_of("expert_count"), groups = most_of("expert_group_count");
        const uint32_t used_groups = most_of("expert_group_used_count");
        if (n > 0 && most_of("expert_used_count") == 0) {
            fail(DW_ERR_FILE, "%s: %sexpert_used_count is 0 or absent; expected 1 to %u (expert_count)", path_,
                 prefix_.c_str(), n);
        }
        if (groups > 0 && (groups >= n || n % groups != 0)) {
            fail(DW_ERR_FILE, "%s: %sexpert_group_count is %u; expected a divisor of expert_count, which is %u", path_,
                 prefix_.c_str(), groups, n);
        }
        if (groups > 1 && (used_groups == 0 || used_groups >= groups)) {
            fail(DW_ERR_FILE, "%s: %sexpert_group_used_count is %u; expected 1 to %u", path_, prefix_.c_str(),
                 used_groups, groups - 1);
        }
    }

    void rope_scaling() const {
        const std::string key = prefix_ + "rope.scaling.type", type = header_.text(key);
        if (header_.has_text(key) &&
            std::find(std::begin(rope_scalings), std::end(rope_scalings), type) == std::end(rope_scalings)) {
            fail(DW_ERR_FILE, "%s: %s is '%s'; expected none, linear, yarn or longrope", path_, key.c_str(),
                 type.c_str());
        }
    }

    void tensor_types() const {
        for (const auto & [name, type] : header_.tensors()) {
            const bool only_f32 = std::any_of(std::begin(f32_only), std::end(f32_only),
                                              [&name = name](const char * end) { return ends_with(name, end); });
            const bool refused  = std::find(std::begin(no_weights), std::end(no_weights), type) != std::end(no_weights);
            if (refused || (only_f32 && type != GGML_TYPE_F32)) {
                fail(DW_ERR_FILE, "%s: the tensor %s is of type %s; expected %s", path_, name.c_str(),
                     ggml_type_name(type), only_f32 ? "f32" : "a type of weights");
            }
        }
    }

    void ours() const {
        tensor_types();
        for (const field & each : attention) {
            within(each);
        }
        for (const real & each : reals) {
            within(each);
        }
        rope_sections();
        if (arch_ == "dflash") {
            return; // dflash_fit.cpp looks at its heads
        }
        equal("attention.value_length", "attention.key_length", most_of("attention.key_length"));
        for (const field & each : delta_net) {
            within(each);
        }
        equal("ssm.inner_size", "ssm.time_step_rank times ssm.state_size",
              (uint64_t) most_of("ssm.time_step_rank") * most_of("ssm.state_size"));
        if (most_of("nextn_predict_layers") > 0 && most_of("nextn_predict_layers") >= most_of("block_count")) {
            fail(DW_ERR_FILE, "%s: %snextn_predict_layers is %u; expected less than block_count, which is %u", path_,
                 prefix_.c_str(), most_of("nextn_predict_layers"), most_of("block_count"));
        }
    }

    void equal(const char * name, const char * other, uint64_t expected) const {
        for (const uint32_t value : values(name)) {
            if (value != expected) {
                fail(DW_ERR_FILE, "%s: %s%s is %u; expected %" PRIu64 ", %s", path_, prefix_.c_str(), name, value,
                     expected, other);
            }
        }
    }

    // pairs of values that each of the four positions rotates
    void rope_sections() const {
        const char * const name  = "rope.dimension_sections";
        const uint32_t     n_rot = most_of("rope.dimension_count");
        const int64_t      most  = ((n_rot ? n_rot : most_of("attention.key_length")) + 1) / 2;
        int64_t            sum   = 0;
        bool               sound = true;
        for (const int32_t section : header_.numbers(prefix_ + name)) {
            sound = sound && section >= 0;
            sum += section;
        }
        const bool empty = sum == 0 && arch_ != "dflash" && !header_.numbers(prefix_ + name).empty();
        if (!sound || sum > most || empty) {
            fail(DW_ERR_FILE,
                 "%s: %s%s come to %" PRId64 " pairs; expected none below 0, together 1 to %" PRId64
                 " (rope.dimension_count)",
                 path_, prefix_.c_str(), name, sum, most);
        }
    }

    const gguf_header & header_;
    const char *        path_;
    std::string         arch_;
    std::string         prefix_;
};

} // namespace

void require_sound_fields(const gguf_header & header, const char * path) {
    require_sound_texts(header, path);
    checker(header, path).run();
}

} // namespace draftwood
