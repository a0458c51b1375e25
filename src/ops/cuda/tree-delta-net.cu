// dw_tree_delta_net on CUDA: the delta rule of a tree, depth first, each node once.
//
// A group of lanes holds a few columns of a head's state in registers and carries them from node to node. Where a node
// has more than one child, the columns are kept until its last child starts from them. If the preorder puts a node's
// child with the most descendants last, at most five are kept at once in a tree of 64 nodes; beyond that the path from
// the root is walked again. Every sum is made of the same parts in the same order as in ggml-cuda's GATED_DELTA_NET,
// so that a path is bit-equal to that op on the path. What differs is how lanes exchange them: the sums of a node's
// output and of its successor's k^T S are reduced together, each lane ending with one of eight.

#include "delta-step.h"
#include "launchers.h"
#include "tree-plan.h"

namespace {

using dw::tree_plan;
using dw::tree_step;

constexpr int n_columns   = 4; // of a group of lanes
constexpr int n_kept      = 5; // nodes whose columns are kept
constexpr int max_threads = 128;

template <int size> struct layout {
    static constexpr int lanes    = size < 32 ? size : 32; // of a group
    static constexpr int per_lane = size / lanes;          // elements of a column
    static constexpr int threads  = lanes * (size / n_columns) < max_threads ? lanes * (size / n_columns) : max_threads;
    static constexpr int groups   = threads / lanes;
    static constexpr int blocks   = size / (n_columns * groups); // of a head
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

    // what a node brings
    struct input {
        float q[per_lane], k[per_lane], v, g, beta;
    };

    __device__ void load(input & in, int node) const {
#pragma unroll
        for (int r = 0; r < per_lane; ++r) {
            in.q[r] = of_node(q_, a_.q.node, node)[r * at::lanes];
            in.k[r] = of_node(k_, a_.k.node, node)[r * at::lanes];
        }
        in.v    = *of_node(v_, a_.v.node, node);
        in.g    = *of_node(g_, a_.g.node, node);
        in.beta = *of_node(beta_, a_.beta.node, node);
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
    __device__ float advance(const input & in, float kv) {
        const float decay = expf(in.g);
        const float u     = (in.v - decay * kv) * in.beta;
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            const float delta =
                __shfl_sync(0xffffffff, u, c / 2 * (at::lanes / 4) + c % 2 * (at::lanes / 8), at::lanes);
#pragma unroll
            for (int r = 0; r < per_lane; ++r) {
                state_[c][r] = dw::delta_step<size <= dw::small_head>(state_[c][r], decay, in.k[r], delta);
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
            input in;
            float parts[n_columns];
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

    // what a commit needs of a node beside u
    __device__ void write_inputs(const input & in, int node) const {
        const int64_t row = sequence_ * a_.n_nodes + node;
        if (first_column_ == 0 && head_ < a_.n_key_heads) {
#pragma unroll
            for (int r = 0; r < per_lane; ++r) {
                a_.factor_k[(row * a_.n_key_heads + head_) * size + r * at::lanes + lane_] = in.k[r];
            }
        }
        if (first_column_ == 0 && lane_ == 0) {
            a_.factor_g[row * a_.n_heads + head_] = in.g;
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

  private:
    // of the state, that this lane ends a reduction with
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

// grid: head, sequence, part of the columns
template <int size> __global__ void __launch_bounds__(layout<size>::threads) tree_delta_net(const arguments a) {
    __shared__ tree_plan p;
    __shared__ float     kept[n_kept][n_columns * layout<size>::per_lane][max_threads];
    walker<size>         walk(a);
    walk.load_state(); // while the plan is made
    dw::make_plan(p, a.parents, a.preorder, blockIdx.y * a.n_nodes, a.n_nodes);

    typename walker<size>::input now, next;
    float                        of_k[n_columns], of_q[n_columns];
    int                          depth = 0; // of what is kept
    tree_step                    here  = p.steps[0];
    walk.load(now, here & dw::node_mask);
    walk.product(now.k, of_k);
    float sum = walk.reduce(of_k, of_k);
    for (int i = 0; i < a.n_nodes; ++i) {
        const int       node  = here & dw::node_mask;
        const tree_step after = i + 1 < a.n_nodes ? p.steps[i + 1] : (tree_step) node;
        walk.load(next, after & dw::node_mask); // long before it is needed
        walk.write_inputs(now, node);
        walk.write_u(walk.advance(now, sum), node);
        walk.product(now.q, of_q);
        if (here & dw::keeps) {
            if (depth < n_kept) {
                walk.keep(kept[depth]);
            }
            ++depth;
        }
        if (after & dw::from_root) {
            walk.load_state();
        } else if (after & dw::from_kept) {
            if (depth <= n_kept) {
                walk.restore(kept[depth - 1]);
            } else {
                walk.walk_to(p, p.parents[after & dw::node_mask]);
            }
            depth -= (after & dw::drops_kept) != 0;
        }
        walk.product(next.k, of_k);
        sum = walk.reduce(of_k, of_q); // of this node's output and the next one's k^T S
        walk.write_out(sum, node);
        now  = next;
        here = after;
    }
}

template <int size> void launch(const arguments & a, int n_seqs, cudaStream_t stream) {
    const dim3 grid((unsigned) a.n_heads, (unsigned) n_seqs, layout<size>::blocks);
    tree_delta_net<size><<<grid, layout<size>::threads, 0, stream>>>(a);
}

} // namespace

bool dw::takes_tree_delta_net(const ggml_tensor * dst) {
    const ggml_tensor * v = dst->src[3];
    for (int i = 0; i <= 6; ++i) {
        if (!is_f32(dst->src[i]) || dst->src[i]->nb[2] > UINT32_MAX) { // by_node::node
            return false;
        }
    }
    const int64_t size = v->ne[0];
    return (size == 16 || size == 32 || size == 64 || size == 128) && v->ne[2] <= max_tree_nodes &&
           is_i32(dst->src[7]) && is_i32(dst->src[8]);
}

void dw::launch_tree_delta_net(ggml_tensor * dst, void * stream) {
    const ggml_tensor * v           = dst->src[3];
    const ggml_tensor * states      = dst->src[6];
    const ggml_tensor * tree        = dst->src[8];
    const int64_t       size        = v->ne[0];
    const int64_t       n_heads     = v->ne[1];
    const int64_t       n_key_heads = dst->src[2]->ne[1];
    const int64_t       max_rows    = tree->ne[0];
    const int32_t *     rows        = data_of<int32_t>(tree);
    float *             k           = data_of<float>(dst); // tree-ops.h: factors, then out
    float *             u           = k + max_rows * n_key_heads * size;
    float *             g           = u + max_rows * n_heads * size;
    const arguments     a           = { by_node(dst->src[1]),
                                        by_node(dst->src[2]),
                                        by_node(v),
                                        by_node(dst->src[4]),
                                        by_node(dst->src[5]),
                                        data_of<float>(states),
                                        stride_of(states, 1),
                                        data_of<int32_t>(dst->src[7]),
                                        rows,
                                        rows + 2 * max_rows,
                                        k,
                                        u,
                                        g,
                                        g + max_rows * n_heads,
                                        (int) n_heads,
                                        (int) n_key_heads,
                                        (int) v->ne[2],
                                        (unsigned) (n_heads * size * sizeof(float)),
                                        1.0f / sqrtf((float) size) };
    const int           n_seqs      = (int) v->ne[3];
    const cudaStream_t  in          = (cudaStream_t) stream;
    switch (size) {
        case 16:
            return launch<16>(a, n_seqs, in);
        case 32:
            return launch<32>(a, n_seqs, in);
        case 64:
            return launch<64>(a, n_seqs, in);
        case 128:
            return launch<128>(a, n_seqs, in);
        default:
            GGML_ABORT("a head of %d", (int) size); // takes_tree_delta_net refused it
    }
}
