// Times the ops of delta-net layers of 35B-A3B one by one on a card: a CUDA graph of 40 layers with weights of their
// own, without a model, a build of the library, or Python. Built where nvcc is and run where a card is, in seconds:
//
//     tools/gpu.sh chain                            here: build/gpu/chain
//     build/gpu/chain 1 6                           there: a line of JSON for 1 and for 6 rows
//     build/gpu/chain --down=q4_k 1 6               the same with experts' down of Q4_K, which is Q6_K else
//     build/gpu/chain --down=q4_k+q6_k 1 6          the same, but the shared expert's of Q6_K
//     build/gpu/chain --experts=iq3_xxs --down=iq3_s+q6_k 1 6   experts as files for small cards have them
//     build/gpu/chain --layers=1 --check 1 6        values alone, for compute-sanitizer
//     build/gpu/chain --attention=1024 1 6          attention layers in place of these, over so many cells
//     build/gpu/chain --attention=768+1280 1 6      the same, with cells behind them that no row sees
//     build/gpu/chain --attention=8192 --cache=q8_0 keys and values of Q8_0
//     build/gpu/chain --drafter=1024 1 16           8 layers of the DFlash drafter, cells as above
//
// A line has us a layer of the chain, of each op alone, and what the chain saves without it. Every number of rows has
// to give row 0 the same bits: else it ends with 1, and with 2 if a value is not finite. A drafter's rows see each
// other: the cells of rows that a block of fewer than 16 lacks are as one of 16 leaves them.

#include "chain/attention.cuh"
#include "chain/drafter.cuh"
#include "chain/layers.cuh"
#include "chain/options.cuh"
#include "ops/door/launch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

// What ggml-cuda.cu has, for one device.
int ggml_cuda_get_device() {
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    return device;
}

void ggml_cuda_error(const char * statement, const char *, const char * file, int line, const char * message) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, statement, message);
    exit(2);
}

const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info info = [] {
        cudaDeviceProp of;
        CUDA_CHECK(cudaGetDeviceProperties(&of, 0));
        ggml_cuda_device_info made{};
        made.device_count         = 1;
        made.devices[0].cc        = 100 * of.major + 10 * of.minor;
        made.devices[0].nsm       = of.multiProcessorCount;
        made.devices[0].smpb      = of.sharedMemPerBlock;
        made.devices[0].smpbo     = of.sharedMemPerBlockOptin;
        made.devices[0].warp_size = 32;
        return made;
    }();
    return info;
}

namespace {

using namespace chain;

constexpr int n_warm = 4, n_runs = 20;

class bench {
  public:
    explicit bench(const options & with) :
        layers_(weights_of<layer_weights>(with.is_drafter() ? 0 : with.n_made(), with.of_experts)),
        head_(weights(GGML_TYPE_Q6_K, { width, n_vocab })),
        cells_(tensor(GGML_TYPE_I32, { 1 }, memory(sizeof(int32_t)))),
        attention_(
            weights_of<attention_weights>(with.kind == kind_of_layer::attention ? with.n_made() : 0, with.cells)),
        drafter_(weights_of<drafter_weights>(with.is_drafter() ? with.n_made() : 0, with.cells)),
        rows_(mixed_rows()) {
        CUDA_CHECK(cudaMemset(cells_->data, 0, sizeof(int32_t)));
        CUDA_CHECK(cudaStreamCreate(&stream_));
        CUDA_CHECK(cudaEventCreate(&begin_));
        CUDA_CHECK(cudaEventCreate(&end_));
    }

    // Prints a line; returns the bits of row 0 behind the layers.
    uint64_t run(int n, bool is_check) {
        if (!drafter_.empty()) {
            const rows_of_layers block(most);
            values(block, layers_of(block)); // leaves keys and values of all its rows
        }
        const rows_of_layers rows(n);
        const auto           layers = layers_of(rows);
        const uint64_t       bits   = values(rows, layers);
        printf("{\"rows\": %d, \"bits\": \"%016llx\"", n, (unsigned long long) bits);
        if (!is_check) {
            times(rows, layers);
        }
        printf("}\n");
        fflush(stdout);
        return bits;
    }

  private:
    template <typename layer, typename value> static std::vector<layer> weights_of(int n_layers, const value & of) {
        std::vector<layer> made;
        for (int i = 0; i < n_layers; ++i) {
            made.emplace_back(of);
        }
        return made;
    }

    // The ops of each layer, with delta nets' states as they were.
    std::vector<std::vector<node>> layers_of(const rows_of_layers & rows) const {
        std::vector<std::vector<node>> made;
        if (!drafter_.empty()) {
            const rows_of_drafter block(rows, drafter_[0].cells);
            for (const auto & of : drafter_) {
                made.push_back(block.of_layer(of));
            }
            return made;
        }
        for (const auto & of : layers_) {
            of.restore();
            made.push_back(rows.of_layer(of, cells_));
        }
        if (!attention_.empty()) {
            attend_in(made, rows);
        }
        return made;
    }

    // What is in front of the experts is an attention layer's.
    void attend_in(std::vector<std::vector<node>> & layers, const rows_of_layers & rows) const {
        const rows_of_attention attention(rows, attention_[0].cells);
        for (size_t i = 0; i < layers.size(); ++i) {
            const node experts = layers[i].back();
            layers[i]          = attention.of_layer(attention_[i]);
            layers[i].push_back(experts);
        }
    }

    // Rows that choose some of each other's experts, as rows of one text do.
    static std::vector<float> mixed_rows() {
        std::mt19937                          random(1);
        std::uniform_real_distribution<float> draw(-1.0f, 1.0f);
        std::vector<float>                    common(width), made;
        std::generate(common.begin(), common.end(), [&] { return draw(random); });
        for (int64_t i = 0; i < most * width; ++i) {
            made.push_back(0.5f * common[i % width] + 0.5f * draw(random));
        }
        return made;
    }

    void start(const rows_of_layers & rows) {
        CUDA_CHECK(cudaMemcpyAsync(rows.x->data, rows_.data(), (size_t) rows.n * width * sizeof(float),
                                   cudaMemcpyHostToDevice, stream_));
    }

    void launch(const node & of) {
        if (!of.op->takes(of.dst)) {
            fprintf(stderr, "%s: declined\n", of.name);
            exit(2);
        }
        const size_t bytes = of.op->workspace ? of.op->workspace(of.dst) : 0;
        GGML_ASSERT(bytes <= workspace_bytes);
        of.op->launch({ 0, stream_, workspace_, workspace_bytes, nullptr }, of.dst);
    }

    uint64_t values(const rows_of_layers & rows, const std::vector<std::vector<node>> & layers) {
        std::vector<float> found(width);
        start(rows);
        for (size_t i = 0; i < std::min<size_t>(layers.size(), 4); ++i) {
            for (const node & each : layers[i]) {
                CUDA_CHECK(cudaMemsetAsync(each.dst->data, 0xff, ggml_nbytes(each.dst), stream_)); // poison
                launch(each);
            }
        }
        CUDA_CHECK(cudaStreamSynchronize(stream_));
        CUDA_CHECK(cudaMemcpy(found.data(), rows.x->data, width * sizeof(float), cudaMemcpyDeviceToHost));
        uint64_t bits = 0;
        for (float each : found) {
            if (!std::isfinite(each)) {
                fprintf(stderr, "%d rows: a value is %f\n", (int) rows.n, each);
                exit(2);
            }
            uint32_t word;
            memcpy(&word, &each, sizeof(word));
            bits = bits * 1099511628211ull + word;
        }
        return bits;
    }

    // us of what `queue` launches as one CUDA graph, the median of runs
    double time(const rows_of_layers & rows, const std::function<void()> & queue) {
        cudaGraph_t     graph;
        cudaGraphExec_t made;
        CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
        queue();
        CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&made, graph, 0));
        std::vector<float> found;
        for (int i = 0; i < n_warm + n_runs; ++i) {
            start(rows);
            CUDA_CHECK(cudaEventRecord(begin_, stream_));
            CUDA_CHECK(cudaGraphLaunch(made, stream_));
            CUDA_CHECK(cudaEventRecord(end_, stream_));
            CUDA_CHECK(cudaStreamSynchronize(stream_));
            float ms;
            CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
            if (i >= n_warm) {
                found.push_back(1000.0f * ms);
            }
        }
        CUDA_CHECK(cudaGraphExecDestroy(made));
        CUDA_CHECK(cudaGraphDestroy(graph));
        std::nth_element(found.begin(), found.begin() + n_runs / 2, found.end());
        return found[n_runs / 2];
    }

    void times(const rows_of_layers & rows, const std::vector<std::vector<node>> & layers) {
        const auto of_layers = [&](const std::function<bool(size_t)> & is_in) {
            return time(rows,
                        [&] {
                            for (const auto & layer : layers) {
                                for (size_t i = 0; i < layer.size(); ++i) {
                                    if (is_in(i)) {
                                        launch(layer[i]);
                                    }
                                }
                            }
                        }) /
                   (double) layers.size();
        };
        const double all = of_layers([](size_t) { return true; });
        printf(", \"layer_us\": %.2f", all);
        for (size_t op = 0; op < layers[0].size(); ++op) {
            printf(", \"%s\": {\"alone_us\": %.2f, \"saved_us\": %.2f}", layers[0][op].name,
                   of_layers([&](size_t i) { return i == op; }), all - of_layers([&](size_t i) { return i != op; }));
        }
        const node head = { "head", &of::product_of_rows::on_cuda,
                            rows_of_layers::result(rows.logits, { rows.x, head_ }) };
        printf(", \"head_us\": %.1f", time(rows, [&] { launch(head); }));
    }

    static constexpr size_t workspace_bytes = 64 << 20;

    std::vector<layer_weights>     layers_; // none: layers are a drafter's
    ggml_tensor *                  head_, *cells_;
    std::vector<attention_weights> attention_; // of each layer, or none
    std::vector<drafter_weights>   drafter_;   // of each layer, or none
    std::vector<float>             rows_;      // [most][width]
    void *                         workspace_ = memory(workspace_bytes);
    cudaStream_t                   stream_;
    cudaEvent_t                    begin_, end_;
};

} // namespace

int main(int argc, char ** argv) {
    const options  with = options_of({ argv + 1, argv + argc });
    cudaDeviceProp card;
    CUDA_CHECK(cudaGetDeviceProperties(&card, 0));
    printf("{\"card\": \"%s\", \"experts\": \"%s\", \"down\": \"%s+%s\"}\n", card.name,
           ggml_type_name(with.of_experts.above), ggml_type_name(with.of_experts.down),
           ggml_type_name(with.of_experts.shared_down));
    bench                 all(with);
    std::vector<uint64_t> bits;
    for (int n : with.rows) {
        bits.push_back(all.run(n, with.is_check));
    }
    return std::all_of(bits.begin(), bits.end(), [&](uint64_t each) { return each == bits[0]; }) ? 0 : 1;
}
