// The product with an output head, whose strips lie whole: 16 rows of Q6_K, one behind the other. One block a
// multiprocessor stays resident and takes strip after strip. A slot has a strip, which one copy brings, and four warps,
// or two for more than 8 rows: no others meet. Sums are added in the order of products.cuh, so bits are the same. Test:
// tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/layer-parts/product-parts.cuh"

namespace dw::layer_parts {

constexpr int tiles_of_large = 8, teams_of_large = 4, width_of_large = tiles_of_large * tile_values;
constexpr int large_pitch = tiles_of_large * (int) sizeof(block_q6_K), large_bytes = tile_rows * large_pitch;
// Slots of a block: with two warps each, an H200 is slower with five, seven and eight. Half of them are filled when x
// is there: the kernels that make x read memory, too.
constexpr int most_slots_of_large = 6, early_slots = 3;
// Slots begin where lines of L2 do, as strips do in memory. 48 bytes behind, the copy engine asked for each line twice,
// and L2's lookups allowed 71 % of the memory's bandwidth.
constexpr int line_of_large = 128; // the alignment of `memory`, where the emulator (tests/ops) reads a number
static_assert(large_bytes % line_of_large == 0 && large_pitch % 4 == 0,
              "a strip is copied as it lies; tiles are even and odd in turn");

// Tiles `first` and `first` + teams_of_large of a strip: what one warp of a team has.
template <typename sums_type, place_of_rows place>
__device__ __forceinline__ void add_tiles_of_large(sums_type & sums, const char * strip, int first, int lane) {
    using tile    = tile_of_Q6_K<place>;
    const char *a = strip + lane / 4 * large_pitch + first * sizeof(block_q6_K), *b = a + 8 * large_pitch;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int value = (first + i * teams_of_large) * tile_values,
                  at    = i * teams_of_large * (int) sizeof(block_q6_K);
        sums.add_tile(tile(a + at, b + at, lane), sums.template hold_tile<tile>(value, blocks_of_tile), value,
                      blocks_of_tile);
    }
}

// Rows of x in a block's shared memory. Lanes of one load meet different banks, and odd tiles' values are rotated.
struct rows_of_large {
    static constexpr int pitch = width_of_large + 16, pitch_of_scales = width_of_large / 32 + 2;
    scale_and_sum *      scales; // [n][pitch_of_scales]
    int8_t *             quants; // [n][pitch]

    static constexpr size_t    bytes(int n) { return n * (pitch_of_scales * sizeof(scale_and_sum) + pitch); }
    __device__ __forceinline__ rows_of_large(char * at, int n) :
        scales((scale_and_sum *) at),
        quants((int8_t *) (scales + n * pitch_of_scales)) {}
    __device__ __forceinline__ int8_t *        quants_of(int i) const { return quants + i * pitch; }
    __device__ __forceinline__ scale_and_sum * scales_of(int i) const { return scales + i * pitch_of_scales; }

    // All threads of a block.
    __device__ __forceinline__ void load(const activations & from, int n) const {
        constexpr int of_row = width_of_large / 16, of_scales = width_of_large / 64;
        for (int i = threadIdx.x; i < n * of_row; i += blockDim.x) {
            const int  row = i / of_row, at = i % of_row;
            const int4 x                  = ((const int4 *) from.quants_of(row))[at];
            ((int4 *) quants_of(row))[at] = at / (tile_values / 16) % 2 ? rotated(x) : x;
        }
        for (int i = threadIdx.x; i < n * of_scales; i += blockDim.x) {
            ((float4 *) scales_of(i / of_scales))[i % of_scales] =
                ((const float4 *) from.scales_of(i / of_scales))[i % of_scales];
        }
    }
};

// A block's slots, each with the warps that multiply its strips, and behind them the rows of x.
template <int n_warps> class slots_of_large {
  public:
    static constexpr int n_threads = 32 * n_warps; // of a slot

    __device__ __forceinline__ slots_of_large(const part & of, char * memory, ptx::arrivals * arrived) :
        of_(of),
        n_slots_((int) blockDim.x / n_threads),
        number_((int) threadIdx.x / n_threads),
        slot_(memory + number_ * large_bytes),
        arrived_(arrived + number_) {}

    __device__ __forceinline__ int  number() const { return number_; }
    __device__ __forceinline__ int  thread() const { return threadIdx.x % n_threads; } // of the slot's
    __device__ __forceinline__ int  first() const { return number_ * gridDim.x + blockIdx.x; }
    __device__ __forceinline__ int  step() const { return n_slots_ * gridDim.x; }
    __device__ __forceinline__ int  n_strips() const { return of_.n_rows / tile_rows; }
    __device__ __forceinline__ void meet() const { ptx::meet(1 + number_, n_threads); }

    // Asks for the first strips, and fills `x` when its rows are there. All threads of the block.
    __device__ __forceinline__ void begin(const rows_of_large & x, const activations & from, int n) const {
        if (thread() == 0) {
            ptx::begin_arrivals(arrived_);
        }
        ask(first(), number_ < early_slots);
        __syncthreads();
        ggml_cuda_pdl_sync();
        ask(first(), number_ >= early_slots);
        x.load(from, n);
        __syncthreads();
    }

    // when all of the slot have read what is there
    __device__ __forceinline__ void ask(int strip, bool is_wanted = true) const {
        if (is_wanted && thread() == 0 && strip < n_strips()) {
            ptx::copy_span</*once*/ true>(slot_, of_.weights + (int64_t) strip * large_bytes, large_bytes, arrived_);
        }
    }
    __device__ __forceinline__ const char * strip_of(int turn) const {
        ptx::wait_for_span(arrived_, turn);
        return slot_;
    }

  private:
    const part &    of_;
    int             n_slots_, number_;
    char *          slot_;
    ptx::arrivals * arrived_;
};

constexpr int warps_of_few = teams_of_large, warps_of_many = 2;

// Sums of a slot, in shared memory: of each team in two turns.
template <int n_columns> constexpr int floats_of_few = 2 * teams_of_large * floats_of_sums<n_columns>;

// Of up to 8 columns: a warp has the tiles of one warp of a team, and all warps add up a strip's rows.
template <int n_columns> __global__ void __launch_bounds__(32 * warps_of_few * most_slots_of_large, 1)
    multiply_large(const __grid_constant__ part of, activations from, int n, int bytes_of_rows) {
    using sums_type = sums_of<n_columns>;
    extern __shared__ __align__(128) char memory[];
    __shared__ ptx::arrivals arrived[most_slots_of_large];
    ggml_cuda_pdl_lc();
    const slots_of_large<warps_of_few> slots(of, memory, arrived);
    const int                          lane = threadIdx.x % 32, team = threadIdx.x / 32 % warps_of_few;
    char * const                       at_rows = memory + blockDim.x / slots.n_threads * large_bytes;
    const rows_of_large                x(at_rows, n);
    slots.begin(x, from, n);
    float * const   of_slot = (float *) (at_rows + bytes_of_rows) + slots.number() * floats_of_few<n_columns>;
    const sums_type none(x, lane, [&](int c) { return min(c, n - 1); });
#pragma unroll 1
    for (int turn = 0, strip = slots.first(); strip < slots.n_strips(); ++turn, strip += slots.step()) {
        float * const      of_turn = of_slot + turn % 2 * teams_of_large * floats_of_sums<n_columns>;
        float * const      mine    = of_turn + team * floats_of_sums<n_columns>;
        const char * const at      = slots.strip_of(turn);
        sums_type          sums    = none;
        if (team % 2 == 0) {
            add_tiles_of_large<sums_type, place_of_rows::even>(sums, at, team, lane);
        } else {
            add_tiles_of_large<sums_type, place_of_rows::odd_by_rotated>(sums, at, team, lane);
        }
        store_sums(mine, sums);
        slots.meet();
        slots.ask(strip + slots.step());
        for (int i = slots.thread(); i < n * tile_rows; i += slots.n_threads) {
            const int     column = i / tile_rows, row = i % tile_rows;
            const float * sums_at = of_turn + place_of_sum(column, row);
            float         sum     = sums_at[0];
#pragma unroll
            for (int t = 1; t < teams_of_large; ++t) {
                sum += sums_at[t * floats_of_sums<n_columns>];
            }
            of.out[column * of.out_stride + strip * tile_rows + row] = sum;
        }
    }
}

// Sums of a slot, in shared memory: the first warp's of two turns, and the second one's.
template <int n_columns> constexpr int floats_of_many = 3 * floats_of_sums<n_columns>;

// Of more columns: there is no room for all sums, and a warp has the tiles of two warps of a team.
template <int n_columns> __global__ void __launch_bounds__(512, 1) // 128 registers a thread
    multiply_large_by_pairs(const __grid_constant__ part of, activations from, int n, int bytes_of_rows) {
    using sums_type = sums_of<n_columns>;
    extern __shared__ __align__(128) char memory[];
    __shared__ ptx::arrivals arrived[most_slots_of_large];
    ggml_cuda_pdl_lc();
    const slots_of_large<warps_of_many> slots(of, memory, arrived);
    const int                           lane      = threadIdx.x % 32;
    const bool                          is_second = threadIdx.x / 32 % warps_of_many;
    char * const                        at_rows   = memory + blockDim.x / slots.n_threads * large_bytes;
    const rows_of_large                 x(at_rows, n);
    slots.begin(x, from, n);
    float * const   of_pair = (float *) (at_rows + bytes_of_rows) + slots.number() * floats_of_many<n_columns>;
    float * const   second  = of_pair + 2 * floats_of_sums<n_columns>;
    const sums_type none(x, lane, [&](int c) { return min(c, n - 1); });
#pragma unroll 1
    for (int turn = 0, strip = slots.first(); strip < slots.n_strips(); ++turn, strip += slots.step()) {
        float * const      first = of_pair + turn % 2 * floats_of_sums<n_columns>;
        float * const      mine  = is_second ? second : first;
        const char * const at    = slots.strip_of(turn);
        sums_type          sums  = none;
        add_tiles_of_large<sums_type, place_of_rows::even>(sums, at, 2 * is_second, lane);
        store_sums(mine, sums);
        sums = none;
        add_tiles_of_large<sums_type, place_of_rows::odd_by_rotated>(sums, at, 2 * is_second + 1, lane);
        if (!is_second) {
            sums.each([&](int column, int row, float sum) { first[place_of_sum(column, row)] += sum; });
        }
        slots.meet();
        slots.ask(strip + slots.step());
        if (is_second) {
            sums.each([&](int column, int row, float sum) {
                const int place = place_of_sum(column, row);
                if (column < n) {
                    of.out[column * of.out_stride + strip * tile_rows + row] = first[place] + second[place] + sum;
                }
            });
        }
    }
}

// kernel: one of these, whose slots have so many warps and floats of sums
template <auto kernel> static bool launch_large_by(int n_warps, int n_floats, const part & of, const activations & x,
                                                   int n, cudaStream_t stream) {
    const int    bytes_of_rows = (int) rows_of_large::bytes(n);
    const size_t of_slot       = large_bytes + sizeof(float) * n_floats;
    const int    n_slots =
        std::min<int>(most_slots_of_large, (int) ((shared_memory_of_block() - bytes_of_rows) / of_slot));
    if (n_slots < most_slots_of_large / 2) {
        return false;
    }
    dw::launch_kernel<kernel, /*keeps_shared*/ true>(
        { dim3(n_multiprocessors()), dim3(32 * n_warps * n_slots), n_slots * of_slot + bytes_of_rows, stream }, of, x,
        n, bytes_of_rows);
    return true;
}

template <int n_columns>
static bool launch_large_of(const part & of, const activations & x, int n, cudaStream_t stream) {
    if constexpr (n_columns <= 8) {
        return launch_large_by<multiply_large<n_columns>>(warps_of_few, floats_of_few<n_columns>, of, x, n, stream);
    } else {
        return launch_large_by<multiply_large_by_pairs<n_columns>>(warps_of_many, floats_of_many<n_columns>, of, x, n,
                                                                   stream);
    }
}

// Launches the product with n rows of x if it is one with a head whose strips lie whole, and says whether it did.
static bool launch_large(const part & of, const activations & x, int n, cudaStream_t stream) {
    if (of.type != GGML_TYPE_Q6_K || x.width != width_of_large || of.stride != large_pitch ||
        of.n_rows % tile_rows != 0 || of.n_rows < n_multiprocessors() * tile_rows * most_slots_of_large ||
        of.end != end_of_product::as_is || !ptx::has_spans()) {
        return false;
    }
    if (n == 1) {
        return launch_large_of<1>(of, x, n, stream);
    }
    return n <= 8 ? launch_large_of<8>(of, x, n, stream) : launch_large_of<16>(of, x, n, stream);
}

} // namespace dw::layer_parts
