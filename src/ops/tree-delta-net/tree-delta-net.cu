// dw_tree_delta_net on CUDA: the delta rule of a tree, depth first, each node once.
//
// Groups of lanes carry a few columns of a head's state from node to node (tree-walker.h). Where a node has more than
// one child, the columns are kept until its last child starts from them. If the preorder puts a node's child with the
// most descendants last, a tree of 62 nodes or fewer keeps at most four at once; beyond that the path from the root is
// walked again.

#include "common.cuh"
#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-ops.h"
#include "ops/tree-delta-net/tree-plan.h"
#include "ops/tree-delta-net/tree-stage.h"
#include "ops/tree-delta-net/tree-walker.h"

#include <algorithm>

namespace op = dw::tree_delta_net;

namespace {

using namespace dw::delta_net;
using dw::tree_plan;
using dw::tree_step;

// What is kept of a node: the columns of all threads.
template <int size> using columns_of_node = float[n_columns * layout<size>::per_lane][max_threads];

// Nodes whose columns are kept at once, at most: a fifth would halve the blocks of a multiprocessor with 100 KB.
constexpr int most_kept = 4;

// So many of a tree of n nodes. If the largest subtree of each node comes last, a tree that keeps k nodes at once has
// at least 2^(k+1) - 1 nodes. In other orders, and behind the fourth, nodes are walked to again.
int n_kept_of(int n_nodes) {
    int n = 0;
    while (n < most_kept && n_nodes + 1 >= 4 << n) {
        ++n;
    }
    return n;
}

// A block's shared memory: the plan of its walk, columns that are kept, inputs of nodes.
template <int size> struct shared_memory {
    static constexpr size_t of_plan = GGML_PAD(sizeof(tree_plan), 16);

    tree_plan &             plan;
    columns_of_node<size> * kept;
    int                     n_kept;
    float *                 inputs;

    __device__ shared_memory(char * at, int n_kept) :
        plan(*(tree_plan *) at),
        kept((columns_of_node<size> *) (at + of_plan)),
        n_kept(n_kept),
        inputs((float *) (kept + n_kept)) {}

    static size_t bytes(int n_nodes) {
        return of_plan + n_kept_of(n_nodes) * sizeof(columns_of_node<size>) + stage<size>::bytes(n_nodes);
    }
};

// Keeps the columns of a node for later children, and goes to where the next one starts if that is not here. depth: of
// what is kept.
template <int size> __device__ __forceinline__ void turn(walker<size> & walk, const shared_memory<size> & shared,
                                                         tree_step step, tree_step next_step, int & depth) {
    if (step & dw::keeps) {
        if (depth < shared.n_kept) {
            walk.keep(shared.kept[depth]);
        }
        ++depth;
    }
    if (next_step & dw::from_root) {
        walk.load_state();
    } else if (next_step & dw::from_kept) {
        if (depth <= shared.n_kept) {
            walk.restore(shared.kept[depth - 1]);
        } else {
            walk.walk_to(shared.plan, shared.plan.parents[next_step & dw::node_mask]);
        }
        depth -= (next_step & dw::drops_kept) != 0;
    }
}

// grid: head, sequence, part of the columns. Cells, states and tree are read before the kernel in front has ended: no
// node of a verify writes them (tree_heads in layer-parts/delta-heads.cu).
template <int size> __global__ void __launch_bounds__(layout<size>::threads)
    tree_delta_net(const arguments a, int n_kept) {
    extern __shared__ __align__(16) char memory[];
    const shared_memory<size>            shared(memory, n_kept);
    tree_plan &                          p = shared.plan;
    ggml_cuda_pdl_lc();
    walker<size> walk(a);
    walk.load_state(); // while the plan is made
    dw::make_plan(p, a.parents, a.preorder, blockIdx.y * a.n_nodes, a.n_nodes);
    ggml_cuda_pdl_sync();

    constexpr tree_step starts_elsewhere = dw::from_root | dw::from_kept;
    const int           lane = walk.lane(), column = walk.column_of_block(), last = a.n_nodes - 1;
    stage<size>         nodes(a, p, shared.inputs, blockIdx.x, blockIdx.z * layout<size>::columns);
    node_input<size>    now, next;
    float               of_k[n_columns], of_q[n_columns];
    int                 depth = 0;
    tree_step           step = p.steps[0], next_step = p.steps[1];
    nodes.fill(0);
    nodes.read(now, 0, lane, column);
    nodes.write_factors();
    walk.product(now.k, of_k);
    float sum = walk.reduce(of_k, of_k);
    for (int i = 0; i < a.n_nodes; ++i) {
        const tree_step step_after = p.steps[min(i + 2, a.n_nodes)]; // read before it is needed
        const int       node       = step & dw::node_mask;
        if (i + 1 == nodes.end() && i < last) {
            nodes.fill(i + 1);
            nodes.write_factors();
        }
        nodes.read(next, min(i + 1, last), lane, column);
        walk.write_u(walk.advance(now, sum), node);
        walk.product(now.q, of_q);
        if ((step & dw::keeps) | (next_step & starts_elsewhere)) {
            turn(walk, shared, step, next_step, depth);
        }
        walk.product(next.k, of_k);
        sum = walk.reduce(of_k, of_q); // of this node's output and the next one's k^T S
        walk.write_out(sum, node);
        now       = next;
        step      = next_step;
        next_step = step_after;
    }
}

// Blocks start while the multiprocessors still work on what is in front, and gather where that ends first. So they take
// enough shared memory that none has more than its share of them.
template <int size> void launch_for(const arguments & a, int n_seqs, cudaStream_t stream) {
    using at = layout<size>;
    const dim3   grid((unsigned) a.n_heads, (unsigned) n_seqs, at::blocks);
    const int    share = (int) dw::n_blocks((int64_t) a.n_heads * n_seqs * at::blocks, dw::n_multiprocessors());
    const size_t bytes = std::max(shared_memory<size>::bytes(a.n_nodes), dw::shared_memory_for(share));
    dw::launch_kernel<tree_delta_net<size>>({ grid, dim3(at::threads), bytes, stream }, a, n_kept_of(a.n_nodes));
}

// whether nodes' values can be copied 16 bytes at a time
bool are_aligned(const ggml_tensor * t) {
    return ((uintptr_t) t->data | t->nb[1] | t->nb[2] | t->nb[3]) % 16 == 0;
}

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * v = dst->src[op::v];
    for (int i = op::scratch; i <= op::states; ++i) {
        if (!dw::is_f32(dst->src[i]) || dst->src[i]->nb[2] > UINT32_MAX) { // by_node::node
            return false;
        }
    }
    const int64_t size = v->ne[0];
    return dw::is_state_size(size) && v->ne[2] <= dw::max_tree_nodes && are_aligned(dst->src[op::q]) &&
           are_aligned(dst->src[op::k]) && are_aligned(v) && dw::is_i32(dst->src[op::cells]) &&
           dw::is_i32(dst->src[op::tree]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *    v           = dst->src[op::v];
    const ggml_tensor *    states      = dst->src[op::states];
    const ggml_tensor *    tree        = dst->src[op::tree];
    const int64_t          size        = v->ne[0];
    const int64_t          n_heads     = v->ne[1];
    const int64_t          n_key_heads = dst->src[op::k]->ne[1];
    const int64_t          max_rows    = tree->ne[0];
    const int32_t *        rows        = dw::data_of<int32_t>(tree);
    const dw::tree_factors kept(dw::data_of<float>(dst), { size, n_heads, n_key_heads, max_rows });
    const arguments        a      = { by_node(dst->src[op::q]),
                                      by_node(dst->src[op::k]),
                                      by_node(v),
                                      by_node(dst->src[op::g]),
                                      by_node(dst->src[op::beta]),
                                      dw::data_of<float>(states),
                                      dw::stride_of(states, 1),
                                      dw::data_of<int32_t>(dst->src[op::cells]),
                                      rows,
                                      rows + 2 * max_rows,
                                      kept.k,
                                      kept.u,
                                      kept.g,
                                      kept.end,
                                      (int) n_heads,
                                      (int) n_key_heads,
                                      (int) v->ne[2],
                                      (unsigned) (n_heads * size * sizeof(float)),
                                      1.0f / sqrtf((float) size) };
    const int              n_seqs = (int) v->ne[3];
    switch (size) {
        case 16:
            return launch_for<16>(a, n_seqs, with.stream);
        case 32:
            return launch_for<32>(a, n_seqs, with.stream);
        case 64:
            return launch_for<64>(a, n_seqs, with.stream);
        case 128:
            return launch_for<128>(a, n_seqs, with.stream);
        default:
            GGML_ABORT("a head of %d", (int) size); // takes() refused it
    }
}

} // namespace

const dw::op_descriptor op::on_cuda = { op::signature, nullptr, takes, nullptr, launch };
