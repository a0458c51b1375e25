// The weights of one launch of products, and which team of which block multiplies what: products.cuh.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/layer-parts/inputs.cuh"
#include "ops/layer-parts/large-products.cuh"
#include "ops/layer-parts/products.cuh"
#include "ops/layer-parts/slots.cuh"

#include <algorithm>
#include <array>
#include <climits>

namespace dw::layer_parts {

constexpr int large_rows     = 1 << 14; // an output head
constexpr int few_rows       = 512;     // of float weights: a warp a row would leave most of a GPU idle
constexpr int most_lone_rows = 512;     // of all parts: a few for each block's warp without a team

// Of so many rows of x a kernel normalises them for all blocks, and each block copies wide ones, of which a warp has
// more than two tiles. Narrow ones are read from L2 as fast (bench/LOG.md).
constexpr int several_rows = 3;

namespace {
static_assert(max_parts >= attention_inputs::most_weights, "an op's products are of one launch");

class product_list {
  public:
    // Returns the part, whose end may be set.
    part & add(const ggml_tensor * weights, float * out, int64_t out_stride) {
        part & made         = all_.each[all_.n++];
        made                = {};
        made.weights        = (const char *) weights->data;
        made.stride         = (int64_t) weights->nb[1];
        made.type           = weights->type;
        made.n_rows         = (int) weights->ne[1];
        made.first_lone_row = -1;
        made.out            = out;
        made.out_stride     = out_stride;
        made.end            = end_of_product::as_is;
        return made;
    }

    // As below, of rows that are normalised.
    void launch(const normalised & input, void * memory, int n, cudaStream_t stream) {
        if (can_be_late<late_normalised>(input.width)) {
            if (n < several_rows) {
                return launch_rows(late_normalised{ input }, input.width, n, stream);
            }
            const late_made rows{ { input }, (char *) memory };
            launch_making(rows, n, stream);
            launch_several(rows, input.width, n, stream);
        } else {
            launch(input, memory, input.width, n, stream);
        }
    }

    // n rows of activations of this width, made of `input`, in memory for activations::bytes(n, width)
    template <typename input_type>
    void launch(const input_type & input, void * memory, int64_t width, int n, cudaStream_t stream) {
        if constexpr (input_type::by_products) {
            if (n == 1 && !has_byte_tiles() && input.can_be_made_by(32 * warps_for(width)) &&
                leaves_room_for_input(width)) {
                return launch_for<1>(input, (int) width, n, stream);
            }
        }
        const activations x = activations::in((char *) memory, n, width);
        launch_input(input, x, n, stream);
        launch(x, n, stream);
    }

    // a row of gated heads, or n rows of quants: if can_be_late, or if there is room for them
    void launch(const late_gated & input, cudaStream_t stream) { launch_for<1>(input, input.width, 1, stream); }
    void launch(const late_quants & input, int n, cudaStream_t stream) {
        if (n == 1) {
            return launch_for<1>(input, input.from.width, n, stream);
        }
        launch_several(input, input.from.width, n, stream);
    }

    // x: n rows
    void launch(const activations & x, int n, cudaStream_t stream) {
        if (all_.n == 1 && launch_large(all_.each[0], x, n, stream)) {
            return;
        }
        if (has_byte_tiles()) {
            launch_rows(activations_for_byte_tiles{ x }, x.width, n, stream);
        } else if (n >= several_rows && !has_teams_for(x.width) && !has_floats() && !is_large() &&
                   has_room(warps_for(x.width), 1, bytes_of_sums<max_rows, late_quants>(warps_for(x.width)),
                            late_quants::bytes(n, x.width))) {
            launch(late_quants{ x }, n, stream);
        } else {
            launch_rows(x, x.width, n, stream);
        }
    }

    // Whether blocks can make such an input. For the most rows, whatever their number: bits do not depend on it.
    template <typename input_type> bool can_be_late(int64_t width) const {
        return !has_floats() && !has_byte_tiles() && !is_large() && has_teams_for(width) &&
               has_room(warps_for(width), 1, bytes_of_sums<max_rows, input_type>(warps_for(width)),
                        input_type::bytes(max_rows, width));
    }

  private:
    static constexpr int values_of_a_warp = 512;                        // of a row: these keep it busy
    using strips_of_team                  = std::array<int, max_parts>; // by part

    static strips_of_team one_each() {
        strips_of_team made;
        made.fill(1);
        return made;
    }

    static int warps_for(int64_t width) {
        return (int) std::clamp<int64_t>((width + values_of_a_warp - 1) / values_of_a_warp, 1, most_warps);
    }

    static bool has_teams_for(int64_t width) { return width <= values_of_a_warp * most_warps; }

    bool has_floats() const {
        return std::any_of(all_.each, all_.each + all_.n, [](const part & each) { return is_float(each.type); });
    }

    bool has_byte_tiles() const {
        return std::any_of(all_.each, all_.each + all_.n, [](const part & each) { return is_byte_tiled(each.type); });
    }

    // an output head: its blocks multiply several strips
    bool is_large() const { return all_.each[0].n_rows >= large_rows; }

    std::array<ggml_type, max_parts> types() const {
        std::array<ggml_type, max_parts> found{};
        for (int i = 0; i < all_.n; ++i) {
            found[i] = all_.each[i].type;
        }
        return found;
    }

    template <typename input_type> void launch_rows(const input_type & input, int width, int n, cudaStream_t stream) {
        if (n <= 2) {
            return n == 1 ? launch_for<1>(input, width, n, stream) : launch_for<2>(input, width, n, stream);
        }
        launch_several(input, width, n, stream);
    }

    template <typename input_type>
    void launch_several(const input_type & input, int width, int n, cudaStream_t stream) {
        return n <= 8 ? launch_for<8>(input, width, n, stream) : launch_for<16>(input, width, n, stream);
    }

    // bytes of a team's
    template <int n_columns, typename input_type> static constexpr size_t bytes_of_sums(int n_warps) {
        return sizeof(float) * floats_of_sums<n_columns> * strips_at_once<input_type> * n_warps;
    }

    template <int n_columns, typename input_type>
    void launch_for(const input_type & input, int width, int n, cudaStream_t stream) {
        constexpr bool makes    = makes_input<input_type>;
        size_t         of_input = makes ? activations::bytes(1, width) : 0;
        if constexpr (is_late_input<input_type>) {
            of_input = input_type::bytes(n, width);
        }
        const size_t of_sums = bytes_of_sums<n_columns, input_type>(warps_for(width));
        block_plan   plan{ {}, warps_for(width), 1, 0, 0, -1 };
        int          n_rounds = is_large() ? INT_MAX : 1;
        if (makes && !is_large() && has_teams_for(width)) {
            n_rounds = plan_teams(plan, width, n, of_sums, of_input);
        }
        const int     n_warps = plan.n_warps * plan.n_teams;
        const int64_t of_a_warp =
            n_rounds == INT_MAX ? INT_MAX : (int64_t) n_rounds * dw::n_blocks(width, plan.n_warps);
        const tile_launch with(types().data(), all_.n, of_a_warp, n_warps, plan.n_teams * of_sums + of_input);
        plan.tiles            = with.plan;
        plan.bytes_of_team    = (int) (plan.n_warps * with.plan.slots_of_a_warp + of_sums);
        plan.activations_at   = plan.n_teams * plan.bytes_of_team;
        const int    n_blocks = share_blocks(n, plan, blocks_at_once<n_columns, input_type>(n_warps, with.bytes));
        const size_t bytes    = add_row(plan, with.bytes, width, n_blocks);
        dw::launch_kernel<products<n_columns, input_type>, makes>(
            { dim3(n_blocks), dim3(32 * (n_warps + (all_.n_lone_rows > 0))), bytes, stream }, all_, input, width, n,
            plan);
    }

    // Teams of a block that makes its input: a block a multiprocessor, or fewer, unless there are many rows of float
    // weights. Returns how many strips a team has at most.
    int plan_teams(block_plan & plan, int64_t width, int n, size_t of_team, size_t of_block) {
        int n_float_rows = 0;
        for (int i = 0; i < all_.n; ++i) {
            n_float_rows += is_float(all_.each[i].type) ? all_.each[i].n_rows : 0;
        }
        if (n_float_rows > most_lone_rows) {
            return 1;
        }
        for (int i = 0; i < all_.n; ++i) {
            if (is_float(all_.each[i].type) || (n == 1 && has_few_rows(all_.each[i]))) {
                all_.each[i].first_lone_row = all_.n_lone_rows;
                all_.n_lone_rows += all_.each[i].n_rows;
            }
        }
        const int      most = std::min(most_teams, (most_block_warps - (all_.n_lone_rows > 0)) / plan.n_warps);
        int            best = INT_MAX, n_rounds = 1;
        strips_of_team found;
        for (int n_teams = 1; n_teams <= most && has_room(plan.n_warps, n_teams, of_team, of_block); ++n_teams) {
            const int rounds = share_strips(width, plan.n_warps, n_teams * n_multiprocessors());
            const int cost = rounds * (n_teams + 2); // a block's strips, and what a round takes whatever runs beside it
            if (cost <= best) {
                best         = cost;
                n_rounds     = rounds;
                plan.n_teams = n_teams;
                found        = n_strips_;
            }
        }
        n_strips_ = found;
        return n_rounds;
    }

    // Q8_0 takes a team longest to unpack: it would end behind all others. A copy of a row takes 16 bytes at a time.
    static bool has_few_rows(const part & of) {
        return of.type == GGML_TYPE_Q8_0 && of.n_rows <= n_multiprocessors() && of.stride % 16 == 0;
    }

    // Says how many strips a team has of each part, for `most` teams in all: only so many that each piece of them has a
    // slot, if that is enough. Returns the largest number.
    int share_strips(int64_t width, int n_warps, int most) {
        most = std::max(most, all_.n);
        for (int rounds = 1;; ++rounds) {
            for (int i = 0; i < all_.n; ++i) {
                const int64_t of_a_warp  = dw::n_blocks(width, n_warps);
                const int     n_pieces   = (int) dw::n_blocks(of_a_warp, values_of_slot(all_.each[i].type));
                const bool    have_slots = rounds <= most_slots;
                n_strips_[i]             = have_slots ? std::min(rounds, std::max(1, most_slots / n_pieces)) : rounds;
            }
            if (n_teams_of_all(n_warps) <= most) {
                return rounds;
            }
        }
    }

    int n_teams_of_all(int n_warps) const {
        int n = 0;
        for (int i = 0; i < all_.n; ++i) {
            n += all_.each[i].first_lone_row < 0 ? teams_of(i, n_warps, 1) : 0;
        }
        return n;
    }

    int teams_of(int i, int n_warps, int n_shares) const {
        const part & of = all_.each[i];
        return (int) (is_float(of.type) ? dw::n_blocks(of.n_rows * n_shares, n_warps)
                                        : dw::n_blocks(dw::n_blocks(of.n_rows, tile_rows), n_strips_[i]));
    }

    // Adds the row of a warp without a team, if there is room for it. Where a block a multiprocessor is about enough,
    // it takes more than half of that one's shared memory: so no other block of this kernel is there.
    size_t add_row(block_plan & plan, size_t bytes, int width, int n_blocks) const {
        const size_t row = GGML_PAD(bytes, 16);
        if (all_.n_lone_rows > 0 && ptx::has_products() && row + width * sizeof(float) <= shared_memory_of_block()) {
            plan.lone_row_at = (int) row;
            bytes            = row + width * sizeof(float);
        }
        const bool is_spread = n_blocks <= n_multiprocessors() && 2 * n_blocks > n_multiprocessors();
        return is_spread ? std::max(bytes, shared_memory_for(1)) : bytes;
    }

    // whether a block has shared memory for one row of activations beside what it multiplies
    bool leaves_room_for_input(int64_t width) const {
        const int n_warps = warps_for(width);
        return has_room(n_warps, 1, sizeof(float) * floats_of_sums<1> * n_warps, activations::bytes(1, width));
    }

    // whether a block has shared memory for teams with a slot a warp
    bool has_room(int n_warps, int n_teams, size_t of_team, size_t of_block) const {
        return tile_launch(types().data(), all_.n, 0, n_teams * n_warps, n_teams * of_team + of_block).bytes <=
               shared_memory_of_block();
    }

    // Blocks that a GPU runs together.
    template <int n_columns, typename input_type> static int blocks_at_once(int n_warps, size_t bytes) {
        using limits           = block_limits<n_columns, input_type>;
        const int by_registers = limits::bounds / 32 * limits::n_blocks / n_warps;
        const int by_memory    = (int) (shared_memory_of_block() / (bytes + 1024));
        return std::max(1, std::min(by_registers, by_memory)) * n_multiprocessors();
    }

    // Gives each part its teams, and returns the number of blocks.
    int share_blocks(int n, const block_plan & plan, int at_once) {
        int n_teams = 0;
        for (int i = 0; i < all_.n; ++i) {
            part & each     = all_.each[i];
            each.first_team = n_teams;
            each.n_shares   = each.n_rows <= few_rows ? (n + 1) / 2 : 1;
            each.n_teams    = each.first_lone_row < 0 ? teams_of(i, plan.n_warps, each.n_shares) : 0;
            if (!is_float(each.type) && each.n_rows >= large_rows && each.n_teams > at_once) {
                each.n_teams = at_once;
            }
            n_teams += each.n_teams;
        }
        const int for_lone_rows = std::min(all_.n_lone_rows, n_multiprocessors());
        return std::max((int) dw::n_blocks(n_teams, plan.n_teams), for_lone_rows);
    }

    parts          all_{};
    strips_of_team n_strips_ = one_each();
};
} // namespace

// dst = residual + weights x, of an x that is launched
static product_list added_product(ggml_tensor * dst, const ggml_tensor * weights, const ggml_tensor * residual) {
    product_list list;
    part &       made = list.add(weights, dw::data_of<float>(dst), dw::stride_of(dst, 1));
    made.end          = end_of_product::add;
    made.a            = dw::data_of<const float>(residual);
    made.a_stride     = dw::stride_of(residual, 1);
    return list;
}

// The same, x as of product_list::launch.
template <typename input_type> static void add_product(const dw::launch_context & with, ggml_tensor * dst,
                                                       const ggml_tensor * weights, const ggml_tensor * residual,
                                                       const input_type & input) {
    product_list list = added_product(dst, weights, residual);
    if constexpr (std::is_same_v<input_type, activations>) {
        list.launch(input, (int) dst->ne[1], with.stream);
    } else {
        list.launch(input, with.workspace, weights->ne[0], (int) dst->ne[1], with.stream);
    }
}

} // namespace dw::layer_parts
