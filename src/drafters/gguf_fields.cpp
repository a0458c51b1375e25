// Fields of a GGUF's header: see gguf_fields.h.
//
// Source: load_hparams of llama-model.cpp and load_arch_hparams of models/qwen35.cpp, qwen35moe.cpp and dflash.cpp
// at the pin, with the GGML_ASSERTs there, in their graphs, in llama-vocab.cpp and in ggml's rope and norms.

#include "drafters/gguf_fields.h"

#include "drafters/gguf_header.h"
#include "drafters/gguf_tensors.h"
#include "drafters/gguf_texts.h"
#include "llama/facts.h"
#include "llama/status.h"

#include <algorithm>
#include <cmath>
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

const char * const key_length   = "attention.key_length";
const char * const value_length = "attention.value_length";
const char * const computed     = "embedding_length / attention.head_count"; // in place of the two above

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

    bool is_absent(const char * name) const { return !header_.has_key(prefix_ + name); }

    // a field that others are held to, and what to call it
    struct limit {
        uint32_t     value;
        const char * name;
    };

    // llama.cpp computes the size of heads where the file does not give it
    limit limit_of(const char * name) const {
        if ((name != key_length && name != value_length) || !is_absent(name)) {
            return { most_of(name), name };
        }
        const std::vector<uint32_t> heads = values("attention.head_count");
        if (heads.empty() || heads[0] == 0) {
            return { 0, name };
        }
        return { most_of("embedding_length") / heads[0], computed };
    }

    [[noreturn]] void refuse(const std::string & name, const std::string & value, const std::string & expected) const {
        fail(DW_ERR_FILE, "%s: %s%s is %s; expected %s", path_, prefix_.c_str(), name.c_str(), value.c_str(),
             expected.c_str());
    }

    [[noreturn]] void refuse(const std::string & name, uint32_t value, const std::string & expected) const {
        refuse(name, std::to_string(value), expected);
    }

    static std::string absent(const char * name) { return std::string(name) + " beside it, which is absent"; }

    void within(const field & f) const {
        const limit most = f.most_of ? limit_of(f.most_of) : limit{ f.most, nullptr };
        const bool  each = values(f.name).size() > 1; // layers without attention may have no heads
        for (const uint32_t value : values(f.name)) {
            if (value > most.value || (value < f.least && !(each && value == 0))) {
                if (most.name && most.name != computed && is_absent(most.name)) {
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
        if (header_.f32(prefix_ + r.name, value) && !(value >= r.least && value <= r.most)) { // nan is neither
            fail(DW_ERR_FILE, "%s: %s%s is %g; expected %g to %g", path_, prefix_.c_str(), r.name, (double) value,
                 r.least, r.most);
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
        const std::string  type = header_.text(prefix_ + name);
        if (header_.has_text(prefix_ + name) &&
            std::find(std::begin(rope_scalings), std::end(rope_scalings), type) == std::end(rope_scalings)) {
            refuse(name, "'" + type + "'", "none, linear, yarn or longrope");
        }
    }

    void ours() const {
        require_sound_tensors(header_, path_);
        for (const field & each : attention) {
            within(each);
        }
        for (const real & each : reals) {
            within(each);
        }
        heads();
        heads_of_layers();
        rope_sections();
        if (arch_ == "dflash") {
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

    // keys and values are of one size
    void heads() const {
        const limit keys = limit_of(key_length), vals = limit_of(value_length);
        for (const limit & size : { keys, vals }) {
            if (size.name == computed && (size.value < 2 || size.value % 2 != 0)) {
                refuse(computed, size.value, "a multiple of 2, as the file gives no size of heads");
            }
        }
        if (keys.value != vals.value) {
            const bool    is_given = vals.name != computed && vals.value != 0;
            const limit & found    = is_given ? vals : keys;
            const limit & other    = is_given ? keys : vals;
            refuse(found.name, found.value,
                   other.value == 0 ? absent(other.name) : std::to_string(other.value) + ", " + other.name);
        }
    }

    // the graphs take one layer's number for all
    void heads_of_layers() const {
        const char * const          name = "attention.head_count_kv";
        const std::vector<uint32_t> all  = values(name);
        if (all.empty() && !is_absent(name)) { // llama.cpp takes booleans for numbers
            refuse(name, "of another type", "a whole number, or one for each layer");
        }
        const uint32_t one = most_of(name);
        for (size_t il = 0; il < all.size(); ++il) {
            // layers without attention have no norm of queries
            const bool may_be_0 =
                arch_ != "dflash" && !header_.has_tensor("blk." + std::to_string(il) + ".attn_q_norm.weight");
            if (all[il] != one && !(all[il] == 0 && may_be_0)) {
                refuse(name, std::to_string(all[il]) + " for layer " + std::to_string(il),
                       "one number for all layers, such as " + std::to_string(one));
            }
        }
    }

    // pairs of values that each of the four positions rotates; a drafter may have none
    void rope_sections() const {
        const char * const         name  = "rope.dimension_sections";
        const std::vector<int32_t> pairs = header_.numbers(prefix_ + name);
        if (is_absent(name)) {
            return;
        }
        if (pairs.size() != 4) {
            refuse(name, "no array of 4 whole numbers", "one");
        }
        const uint32_t n_rot = most_of("rope.dimension_count");
        const int64_t  most  = ((int64_t) (n_rot ? n_rot : limit_of(key_length).value) + 1) / 2;
        const int64_t  first = (int64_t) pairs[0] + pairs[1] + pairs[2];
        const bool     sound = *std::min_element(pairs.begin(), pairs.end()) >= 0;
        const bool     empty = first == 0 && (pairs[3] != 0 || arch_ != "dflash");
        if (!sound || empty || first + pairs[3] > most) {
            std::string shown;
            for (const int32_t n : pairs) {
                shown += (shown.empty() ? "" : ", ") + std::to_string(n);
            }
            refuse(name, "[" + shown + "]",
                   "none below 0, one of the first three above 0, together at most " + std::to_string(most) +
                       " pairs (rope.dimension_count)");
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
