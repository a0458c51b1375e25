// What the next nodes of a walk bring, in a block's shared memory. For tree-delta-net.cu; must not know states.
//
// A node's step takes less time than a load from the L2 cache, so the nodes of a stage are loaded together. Order:
// tree-plan.h. Test: tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/tree-delta-net/tree-walker.h"

#include <algorithm>

namespace dw::delta_net {

constexpr int n_staged = 16; // nodes, at most

template <int size> class stage {
    using at = layout<size>;

  public:
    // of a tree of n_nodes
    static __host__ __device__ int room(int n_nodes) { return n_nodes < n_staged ? n_nodes : n_staged; }
    static size_t bytes(int n_nodes) { return room(n_nodes) * (2 * size + at::columns + 2) * sizeof(float); }

    // memory: bytes(n_nodes), aligned to 16 bytes. The block has a head's columns from first_column on.
    __device__ stage(const arguments & a, const tree_plan & p, float * memory, int head, int first_column) :
        a_(a),
        p_(p),
        keys_(memory),
        queries_(keys_ + room(a.n_nodes) * size),
        values_(queries_ + room(a.n_nodes) * size),
        decays_(values_ + room(a.n_nodes) * at::columns),
        betas_(decays_ + room(a.n_nodes)),
        head_(head),
        first_column_(first_column) {}

    // Loads the nodes that come `first` in the order, and those behind it. A head's first block writes what a commit
    // needs of them beside u. All threads of a block.
    __device__ void fill(int first) {
        const int s = blockIdx.y, slot = threadIdx.x;
        first_ = first;
        n_     = min(n_staged, a_.n_nodes - first);
        if (first > 0) {
            __syncthreads(); // what is there has been read
        }
        copy<size>(keys_, a_.k.of(head_ % a_.k.n_heads, s), a_.k.node);
        copy<size>(queries_, a_.q.of(head_ % a_.q.n_heads, s), a_.q.node);
        copy<at::columns>(values_, a_.v.of(head_, s) + first_column_, a_.v.node);
        ptx::end_of_copies();
        if (slot < n_) {
            const int   node = node_of(slot);
            const float g    = *of_node(a_.g.of(head_, s), a_.g.node, node);
            betas_[slot]     = *of_node(a_.beta.of(head_, s), a_.beta.node, node);
            decays_[slot]    = expf(g);
            if (first_column_ == 0) {
                a_.factor_g[((int64_t) s * a_.n_nodes + node) * a_.n_heads + head_] = g;
            }
        }
        ptx::wait_for_copies<0>();
        __syncthreads();
        if (first_column_ == 0 && head_ < a_.n_key_heads) {
            write_keys(a_.factor_k + ((int64_t) s * a_.n_nodes * a_.n_key_heads + head_) * size);
        }
    }

    // what a lane of a group needs of the node that comes i-th, for a column of the block
    __device__ void read(node_input<size> & in, int i, int lane, int column) const {
        const int slot = i % n_staged;
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
            ptx::copy_16(ptx::address_of(to + 4 * i), of_node(from, stride, node_of(i / fours)) + 4 * (i % fours));
        }
    }

    // to: of the sequence's first node
    __device__ void write_keys(float * to) const {
        for (int i = threadIdx.x; i < n_ * size; i += at::threads) {
            to[(int64_t) node_of(i / size) * a_.n_key_heads * size + i % size] = keys_[i];
        }
    }

    const arguments & a_;
    const tree_plan & p_;
    float *           keys_; // [room][size], as queries_
    float *           queries_;
    float *           values_; // [room][columns]
    float *           decays_; // [room], as betas_
    float *           betas_;
    int               head_, first_column_;
    int               first_ = 0, n_ = 0; // nodes that are there
};

} // namespace dw::delta_net
