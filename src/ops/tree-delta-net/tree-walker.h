// A share of a head's state on its way through a tree: a group of lanes holds a few columns in registers and carries
// them from node to node. For tree-delta-net.cu; must not know the order of the nodes, nor what is kept meanwhile.
//
// Every sum is made of the same parts in the same order as in ggml-cuda's GATED_DELTA_NET, so that a path is bit-equal
// to that op on the path. What differs is how lanes exchange them: the sums of a node's output and of its successor's
// k^T S are reduced together, each lane ending with one of eight. Test: tests/ops/tree_kernels.py.

#pragma once

#include "ops/delta-net/delta-step-cuda.h"
#include "ops/door/launch.h"
#include "ops/tree-delta-net/tree-plan.h"

namespace dw::delta_net {

constexpr int n_columns   = 4; // of a group of lanes
constexpr int max_threads = 128;

template <int size> struct layout {
    static constexpr int lanes    = size < 32 ? size : 32; // of a group
    static constexpr int per_lane = size / lanes;          // elements of a column
    static constexpr int threads  = lanes * (size / n_columns) < max_threads ? lanes * (size / n_columns) : max_threads;
    static constexpr int groups   = threads / lanes;
    static constexpr int columns  = n_columns * groups; // of a block
    static constexpr int blocks   = size / columns;     // of a head
    static_assert(threads >= dw::max_tree_nodes, "one for each node of a plan");
};

// f32 values of a sequence's nodes; strides in bytes
struct by_node {
    const char * data;
    size_t       head, sequence;
    unsigned     node, n_heads;

    explicit by_node(const ggml_tensor * t) :
        data(dw::data_of<char>(t)),
        head(t->nb[1]),
        sequence(t->nb[3]),
        node((unsigned) t->nb[2]),
        n_heads((unsigned) t->ne[1]) {}

    // of a sequence's first node
    __device__ const float * of(unsigned h, unsigned s) const {
        return (const float *) (data + h * head + s * sequence);
    }
};

// The same of another node. Two factors of 32 bits: one instruction.
template <typename T> __device__ T * of_node(T * first, unsigned stride, unsigned node) {
    return (T *) ((char *) first + (uint64_t) node * stride);
}

struct arguments {
    by_node         q, k, v, g, beta;
    const float *   states;
    int64_t         cell; // stride in values
    const int32_t * cells;
    const int32_t * parents;
    const int32_t * preorder;
    float *         factor_k;
    float *         factor_u;
    float *         factor_g;
    float *         out;
    int             n_heads, n_key_heads, n_nodes;
    unsigned        row; // of u and out, in bytes
    float           scale;
};

// what a node brings to a lane
template <int size> struct node_input {
    float q[layout<size>::per_lane], k[layout<size>::per_lane], v, decay, beta;
};

// one group's share of a state, and the walk over it
template <int size> class walker {
    using at = layout<size>;

    static constexpr int per_lane = at::per_lane;

  public:
    __device__ walker(const arguments & a) :
        a_(a),
        head_(blockIdx.x),
        sequence_(blockIdx.y),
        lane_(threadIdx.x % at::lanes),
        first_column_((blockIdx.z * at::groups + threadIdx.x / at::lanes) * n_columns),
        upper_(mask_of(at::lanes / 2)),
        right_(mask_of(at::lanes / 4)),
        odd_(mask_of(at::lanes / 8)),
        q_(a.q.of(head_ % a.q.n_heads, sequence_) + lane_),
        k_(a.k.of(head_ % a.k.n_heads, sequence_) + lane_),
        v_(a.v.of(head_, sequence_) + column()),
        g_(a.g.of(head_, sequence_)),
        beta_(a.beta.of(head_, sequence_)),
        from_(a.states + a.cells[sequence_] * a.cell + (int64_t) (head_ * size + first_column_) * size + lane_),
        to_((lane_ < at::lanes / 2 ? a.factor_u : a.out) +
            (int64_t) (sequence_ * a.n_nodes * a.n_heads + head_) * size + column()) {}

    __device__ void load(node_input<size> & in, int node) const {
#pragma unroll
        for (int r = 0; r < per_lane; ++r) {
            in.q[r] = of_node(q_, a_.q.node, node)[r * at::lanes];
            in.k[r] = of_node(k_, a_.k.node, node)[r * at::lanes];
        }
        in.v     = *of_node(v_, a_.v.node, node);
        in.beta  = *of_node(beta_, a_.beta.node, node);
        in.decay = expf(*of_node(g_, a_.g.node, node));
    }

    __device__ void load_state() {
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
#pragma unroll
            for (int r = 0; r < per_lane; ++r) {
                state_[c][r] = from_[c * size + r * at::lanes];
            }
        }
    }

    // This lane's part of x^T S, by column.
    __device__ void product(const float (&x)[per_lane], float (&parts)[n_columns]) const {
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            parts[c] = 0.0f;
#pragma unroll
            for (int r = 0; r < per_lane; ++r) {
                parts[c] += state_[c][r] * x[r];
            }
        }
    }

    // Sums over lanes: of `low` for lanes of the lower half, of `high` for the others, one column each (column()).
    __device__ float reduce(const float (&low)[n_columns], const float (&high)[n_columns]) const {
        float x[n_columns];
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            x[c] = exchange(low[c], high[c], at::lanes / 2, upper_);
        }
        const float y0 = exchange(x[0], x[2], at::lanes / 4, right_);
        const float y1 = exchange(x[1], x[3], at::lanes / 4, right_);
        float       z  = exchange(y0, y1, at::lanes / 8, odd_);
#pragma unroll
        for (int offset = at::lanes / 16; offset > 0; offset /= 2) {
            z += swap(z, offset);
        }
        return z;
    }

    // The state after a node; kv: this lane's column of k^T S before it. Returns this column of u.
    __device__ float advance(const node_input<size> & in, float kv) {
        const float u = (in.v - in.decay * kv) * in.beta;
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            const float delta =
                __shfl_sync(0xffffffff, u, c / 2 * (at::lanes / 4) + c % 2 * (at::lanes / 8), at::lanes);
#pragma unroll
            for (int r = 0; r < per_lane; ++r) {
                state_[c][r] = dw::delta_step<size <= dw::small_head>(state_[c][r], in.decay, in.k[r], delta);
            }
        }
        return u;
    }

    // the state after a node whose columns were not kept
    __device__ void walk_to(const tree_plan & p, int node) {
        uint64_t path = 0;
        for (int i = node; i >= 0; i = p.parents[i]) {
            path |= (uint64_t) 1 << i;
        }
        load_state();
        for (; path != 0; path &= path - 1) { // parents come first
            node_input<size> in;
            float            parts[n_columns];
            load(in, __ffsll((long long) path) - 1);
            product(in.k, parts);
            advance(in, reduce(parts, parts));
        }
    }

    // Columns of threads of their own: nobody waits for anybody.
    __device__ void keep(float (*kept)[max_threads]) const {
#pragma unroll
        for (int i = 0; i < n_columns * per_lane; ++i) {
            kept[i][threadIdx.x] = state_[i / per_lane][i % per_lane];
        }
    }

    __device__ void restore(const float (*kept)[max_threads]) {
#pragma unroll
        for (int i = 0; i < n_columns * per_lane; ++i) {
            state_[i / per_lane][i % per_lane] = kept[i][threadIdx.x];
        }
    }

    // The lower half of the lanes has u, the upper half the output: one of a column's lanes writes it.
    __device__ void write_u(float u, int node) const {
        if (lane_ % (at::lanes / 8) == 0 && lane_ < at::lanes / 2) {
            *of_node(to_, a_.row, node) = u;
        }
    }

    __device__ void write_out(float sum, int node) const {
        if (lane_ % (at::lanes / 8) == 0 && lane_ >= at::lanes / 2) {
            *of_node(to_, a_.row, node) = sum * a_.scale;
        }
    }

    __device__ int lane() const { return lane_; }

    // which of the block's columns it is that this lane ends a reduction with
    __device__ int column_of_block() const { return column() - blockIdx.z * at::columns; }

  private:
    // the same, of the state's
    __device__ int column() const {
        return first_column_ + lane_ / (at::lanes / 4) % 2 * 2 + lane_ / (at::lanes / 8) % 2;
    }

    // all bits of a lane that has this one set
    __device__ uint32_t mask_of(int bit) const {
        uint32_t mask = lane_ & bit ? 0xffffffff : 0;
        asm("" : "+r"(mask)); // else the compiler chooses by branches, and shuffles lanes that have parted
        return mask;
    }

    __device__ static float choose(uint32_t mask, float yes, float no) {
        return __uint_as_float((__float_as_uint(yes) & mask) | (__float_as_uint(no) & ~mask));
    }

    __device__ static float swap(float x, int offset) { return __shfl_xor_sync(0xffffffff, x, offset, at::lanes); }

    // two lanes' sum, of `first` for the one and of `second` for the other
    __device__ static float exchange(float first, float second, int offset, uint32_t mask) {
        return choose(mask, second, first) + swap(choose(mask, first, second), offset);
    }

    const arguments & a_;
    int               head_, sequence_, lane_, first_column_;
    uint32_t          upper_, right_, odd_; // masks
    const float *     q_;
    const float *     k_;
    const float *     v_;
    const float *     g_;
    const float *     beta_;
    const float *     from_;
    float *           to_;
    float             state_[n_columns][per_lane];
};

} // namespace dw::delta_net
