// Attention of a tree, and the KV cells of a commit: see tree-attention.h.

#include "ops/tree-attention/tree-attention.h"

#include "ops/mul-mat-rows/mul-mat-rows.h"
#include "ops/tree-delta-net/tree-rows.h"
#include "vec.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tree_scores    = dw::tree_scores;
namespace tree_values    = dw::tree_values;
namespace commit_rows    = dw::tree_commit_rows;
namespace commit_columns = dw::tree_commit_columns;

namespace {

// the path of a row: where its cells lie, and where plain decoding would have them
struct placed_path {
    std::vector<int32_t> rows, from, to;
    bool                 straight; // nothing moves

    void set(const dw::tree_rows & tree, int64_t row) {
        const int64_t n = tree.depths[row] + 1;
        rows.resize(n);
        from.resize(n);
        to.resize(n);
        tree.path((int32_t) row, rows.data());
        straight = true;
        for (int64_t k = 0; k < n; ++k) {
            from[k]  = tree.cells[rows[k]];
            to[k]    = tree.cells[rows[0] + k];
            straight = straight && from[k] == to[k];
        }
    }
};

// ascending, so that none is overwritten before its turn
template <typename T> void move_all(T * data, const placed_path & path) {
    for (size_t k = 0; k < path.to.size(); ++k) {
        data[path.to[k]] = data[path.from[k]];
    }
}

// one row of values [n_kv], arranged for a path, and put back afterwards
template <typename T> class arranged {
  public:
    arranged(const void * row, int64_t n) :
        original_((const T *) row),
        copy_(original_, original_ + n) {}

    const T * original() const { return original_; }
    const T * arrange(const placed_path & path) {
        move_all(copy_.data(), path);
        return copy_.data();
    }
    void restore(const placed_path & path) {
        for (const int32_t cell : path.to) {
            copy_[cell] = original_[cell];
        }
    }

  private:
    const T *      original_;
    std::vector<T> copy_;
};

float weigh(ggml_type type, const void * values, const float * weights, int64_t n) {
    float out = 0.0f;
    if (type == GGML_TYPE_F32) {
        ggml_vec_dot_f32((int) n, &out, 0, (const float *) values, 0, weights, 0, 1);
    } else {
        dw_dot_row(type, n, values, weights, &out);
    }
    return out;
}

// channel d of kv head h in stream s, for all rows and the query heads that share it
template <typename T>
void weigh_channel(ggml_tensor * dst, const std::vector<placed_path> & paths, int64_t d, int64_t h, int64_t s) {
    const ggml_tensor * values  = dst->src[tree_values::values];
    const ggml_tensor * weights = dst->src[tree_values::weights];
    const int64_t       n_kv    = values->ne[0];
    const int64_t       n_rows  = weights->ne[1];
    const int64_t       n_share = weights->ne[2] / values->ne[2];
    arranged<T> row((const char *) values->data + d * values->nb[1] + h * values->nb[2] + s * values->nb[3], n_kv);
    for (int64_t i = 0; i < n_rows; ++i) {
        const placed_path & path = paths[s * n_rows + i];
        const T *           data = path.straight ? row.original() : row.arrange(path);
        for (int64_t q = h * n_share; q < (h + 1) * n_share; ++q) {
            const auto at = [&](const ggml_tensor * t) {
                return (char *) t->data + i * t->nb[1] + q * t->nb[2] + s * t->nb[3];
            };
            ((float *) at(dst))[d] = weigh(values->type, data, (const float *) at(weights), n_kv);
        }
        if (!path.straight) {
            row.restore(path);
        }
    }
}

void run_scores(ggml_tensor * dst, int ith, int nth, void *) {
    const dw::tree_rows tree(dst->src[tree_scores::tree]);
    const int64_t       n_rows = dst->ne[1] * dst->ne[3];
    placed_path         path;
    for (int64_t row = ith; row < n_rows; row += nth) {
        path.set(tree, row);
        if (path.straight) {
            continue;
        }
        for (int64_t h = 0; h < dst->ne[2]; ++h) {
            move_all((float *) ((char *) dst->data + row % dst->ne[1] * dst->nb[1] + h * dst->nb[2] +
                                row / dst->ne[1] * dst->nb[3]),
                     path);
        }
    }
}

void run_values(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor *      values = dst->src[tree_values::values];
    const dw::tree_rows      tree(dst->src[tree_values::tree]);
    std::vector<placed_path> paths(dst->ne[1] * dst->ne[3]);
    for (size_t row = 0; row < paths.size(); ++row) {
        paths[row].set(tree, (int64_t) row);
    }
    const int64_t n = values->ne[1] * values->ne[2] * values->ne[3]; // channels of all heads and streams
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
        const int64_t d = i % values->ne[1];
        const int64_t h = i / values->ne[1] % values->ne[2];
        const int64_t s = i / (values->ne[1] * values->ne[2]);
        if (values->type == GGML_TYPE_F32) {
            weigh_channel<float>(dst, paths, d, h, s);
        } else {
            weigh_channel<uint16_t>(dst, paths, d, h, s);
        }
    }
}

void run_commit_rows(ggml_tensor * dst, int ith, int nth, void *) {
    const int32_t * moves = (const int32_t *) dst->src[commit_rows::moves]->data;
    for (int64_t layer = ith; layer < dst->ne[3]; layer += nth) {
        char * data = (char *) dst->data + layer * dst->nb[3];
        for (int32_t i = 0; i < moves[0]; ++i) {
            std::memcpy(data + moves[2 + 2 * i] * dst->nb[1], data + moves[1 + 2 * i] * dst->nb[1], dst->nb[1]);
        }
    }
}

void run_commit_columns(ggml_tensor * dst, int ith, int nth, void *) {
    const int32_t * moves   = (const int32_t *) dst->src[commit_columns::moves]->data;
    const int64_t   n_cells = dst->ne[0];
    const int64_t   n_rows  = dst->ne[1] * dst->ne[3]; // of all layers
    for (int64_t r = n_rows * ith / nth; r < n_rows * (ith + 1) / nth; ++r) {
        char * row = (char *) dst->data + r / dst->ne[1] * dst->nb[3] + r % dst->ne[1] * dst->nb[1];
        for (int32_t i = 0; i < moves[0]; ++i) {
            const auto at = [&](int64_t cell) {
                return row + cell / n_cells * dst->nb[2] + cell % n_cells * dst->nb[0];
            };
            std::memcpy(at(moves[2 + 2 * i]), at(moves[1 + 2 * i]), dst->nb[0]);
        }
    }
}

} // namespace

const dw::op_descriptor tree_scores::on_cpu    = { tree_scores::signature, run_scores };
const dw::op_descriptor tree_values::on_cpu    = { tree_values::signature, run_values };
const dw::op_descriptor commit_rows::on_cpu    = { commit_rows::signature, run_commit_rows };
const dw::op_descriptor commit_columns::on_cpu = { commit_columns::signature, run_commit_columns };
