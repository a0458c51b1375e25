// What the next nodes of a walk bring, in a block's shared memory. For tree-delta-net.cu; must not know states.
//
// A node's step takes less time than a load from the L2 cache, so the nodes of a stage are loaded together. Order:
// tree-plan.h. Test: tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/tree-delta-net/tree-walker.h"

namespace dw::delta_net {

template <int size> class stage {
    using at = layout<size>;

  public:
    // Nodes of a stage. Those of a small tree are loaded at once.
    static __host__ __device__ int room(int n_nodes) { return n_nodes <= 16 ? n_nodes : 8; }
    static size_t bytes(int n_nodes) { return room(n_nodes) * (2 * size + at::columns + 3) * sizeof(float); }

    // memory: bytes(n_nodes), aligned to 16 bytes. The block has a head's columns from first_column on.
    __device__ stage(const arguments & a, const tree_plan & p, float * memory, int head, int first_column) :
        a_(a),
        p_(p),
        room_(room(a.n_nodes)),
        keys_(memory),
        queries_(keys_ + room_ * size),
        values_(queries_ + room_ * size),
        decays_(values_ + room_ * at::columns),
        betas_(decays_ + room_),
        gates_(betas_ + room_),
        head_(head),
        first_column_(first_column) {}

    // the first node in the order that is not loaded
    __device__ int end() const { return first_ + room_; }

    // Loads nodes first, first + 1, ... of the order, as many as there is room for. All threads of a block.
    __device__ void fill(int first) {
        const int s = blockIdx.y, slot = threadIdx.x;
        first_ = first;
        n_     = min(room_, a_.n_nodes - first);
        if (first > 0) {
            __syncthreads(); // what is there has been read
        }
        copy<size>(keys_, a_.k.of(head_ % a_.k.n_heads, s), a_.k.node);
        copy<size>(queries_, a_.q.of(head_ % a_.q.n_heads, s), a_.q.node);
        copy<at::columns>(values_, a_.v.of(head_, s) + first_column_, a_.v.node);
        ptx::end_of_copies();
        if (slot < n_) {
            const float beta = *of_node(a_.beta.of(head_, s), a_.beta.node, node_of(slot));
            const float gate = *of_node(a_.g.of(head_, s), a_.g.node, node_of(slot));
            betas_[slot]     = beta; // behind both loads
            gates_[slot]     = gate;
            decays_[slot]    = expf(gate);
        }
        ptx::wait_for_copies<0>();
        __syncthreads();
    }

    // What a commit needs of them beside u: a head's first block writes it. All threads of a block.
    __device__ void write_factors() const {
        if (first_column_ != 0) {
            return;
        }
        const int64_t first_row = (int64_t) blockIdx.y * a_.n_nodes;
        if (threadIdx.x < n_) {
            a_.factor_g[(first_row + node_of(threadIdx.x)) * a_.n_heads + head_] = gates_[threadIdx.x];
        }
        for (int i = threadIdx.x; head_ < a_.n_key_heads && i < n_ * size; i += at::threads) {
            a_.factor_k[((first_row + node_of(i / size)) * a_.n_key_heads + head_) * size + i % size] = keys_[i];
        }
    }

    // what a lane of a group needs of the node that comes i-th, for a column of the block
    __device__ void read(node_input<size> & in, int i, int lane, int column) const {
        const int slot = i - first_;
#pragma unroll
        for (int r = 0; r < at::per_lane; ++r) {
            in.q[r] = queries_[slot * size + r * at::lanes + lane];
            in.k[r] = keys_[slot * size + r * at::lanes + lane];
        }
        in.v     = values_[slot * at::columns + column];
        in.decay = decays_[slot];
        in.beta  = betas_[slot];
    }

  private:
    __device__ int node_of(int slot) const { return p_.steps[first_ + slot] & node_mask; }

    // Asks for `width` values of each node.
    template <int width> __device__ void copy(float * to, const float * from, unsigned stride) const {
        constexpr int fours = width / 4; // of a node
#pragma unroll 4
        for (int i = threadIdx.x; i < n_ * fours; i += at::threads) {
            ptx::copy_16</*once*/ false>(ptx::address_of(to + 4 * i),
                                         of_node(from, stride, node_of(i / fours)) + 4 * (i % fours));
        }
    }

    const arguments & a_;
    const tree_plan & p_;
    int               room_;
    float *           keys_; // [room][size], as queries_
    float *           queries_;
    float *           values_; // [room][columns]
    float *           decays_; // [room], as betas_ and gates_
    float *           betas_;
    float *           gates_;
    int               head_, first_column_;
    int               first_ = 0, n_ = 0; // nodes that are there
};

} // namespace dw::delta_net
