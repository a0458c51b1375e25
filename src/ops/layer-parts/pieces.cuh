// Weights on their way into shared memory, in pieces: 16 rows of 256 or 512 values. Each warp has slots of its own, and
// asks for the next pieces while it multiplies one. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/tile-layouts.cuh"

namespace dw::layer_parts {

// 16 rows of weights, n_values each from a row's value 0 on.
struct strip {
    const char * from;     // row 0
    int          stride;   // bytes
    int          last_row; // rows behind it are this one
    int          n_values;
    ggml_type    type;

    __device__ __forceinline__ const char * row(int i) const { return from + min(i, last_row) * stride; }

    // up to tiled<of>::n_values values from `first` on; of: the type, or byte_tiles
    template <ggml_type of> __device__ __forceinline__ strip piece(int first) const {
        if constexpr (tiled<of>::is_made) {
            const int at = first / tile_values * bytes_of_small_tile(type);
            return { from + at, stride, last_row, min(tile_values, n_values - first), type };
        } else {
            return { from + tiled<of>::bytes(first), stride, last_row, min(tiled<of>::n_values, n_values - first),
                     type };
        }
    }
};

// Makes bytes of a piece of a byte-tiled type that has come, in place of those before. Of other types: nothing. A warp.
template <ggml_type type>
__device__ __forceinline__ void prepare(char * slot, char * made, const strip & of, int lane) {
    if constexpr (tiled<type>::is_made) {
        const int row = lane % tile_rows; // of two lanes, with half of it each
        __syncwarp();
        make_bytes(of.type, slot + row * tiled<type>::pitch + tiled<type>::offset(of.row(row)),
                   made + row * byte_row::pitch, lane / tile_rows);
        __syncwarp();
    }
}

// Copies a piece into a slot, without waiting: weights are read once a token, so they leave what is read again in the
// L2 cache. A warp: 8 lanes copy 128 bytes of a row, side by side.
template <ggml_type type>
__device__ __forceinline__ void ask_for(ptx::shared_address slot, const strip & of, int lane) {
    using tile       = tiled<type>;
    constexpr int  n = tile::pitch / 16, n_tail = n % 8;    // loads of a row
    constexpr bool is_few     = n_tail == 1 || n_tail == 2; // the last ones are of 16 rows at once
    constexpr int  n_by_eight = (is_few ? n : n + 7) / 8;
    const int      n_bytes    = tile::is_made    ? bytes_of_small_tile(of.type)
                                : tile::is_whole ? tile::block_bytes
                                                 : tile::bytes(of.n_values);
    const auto     ask        = [&](int i, ptx::shared_address to, const char * at) {
        const int begin = tile::offset(at);
        if (16 * i < begin + n_bytes) {
            ptx::copy_16</*once*/ true>(to + 16 * i, at - begin + 16 * i);
        }
    };
    const int first = lane % 8;
#pragma unroll
    for (int row = lane / 8, k = 0; k < tile_rows / 4; ++k, row += 4) {
        const char * at = of.row(row);
#pragma unroll
        for (int i = 0; i < n_by_eight; ++i) {
            if (8 * i + 8 <= n || 8 * i + first < n) {
                ask(8 * i + first, slot + row * tile::pitch, at);
            }
        }
    }
    if constexpr (is_few) {
        const int row = lane / n_tail;
        if (row < tile_rows) {
            ask(n - n_tail + lane % n_tail, slot + row * tile::pitch, of.row(row));
        }
    }
}

// All requests of this warp but the last n_open have arrived.
template <int n_open> __device__ __forceinline__ void wait_for_requests() {
    ptx::wait_for_copies<n_open>();
    __syncwarp();
}

// sums += a piece that arrives in a slot, times columns from their value `first` on. arrived(): waits for it, when what
// is held of the columns is on its way. A warp.
template <ggml_type type, typename sums_type, typename arrived_type>
__device__ __forceinline__ void multiply_piece(sums_type & sums, char * slot, char * made, const strip & of, int first,
                                               int lane, arrived_type && arrived) {
    using tile            = tiled<type>;
    const int    row      = lane / 4;
    const char * from     = tile::is_made ? made : slot;
    const char * a        = from + row * tile::read_pitch + tile::read_offset(of.row(row));
    const char * b        = from + (row + 8) * tile::read_pitch + tile::read_offset(of.row(row + 8));
    const auto   n_blocks = [&](int done) { return min(blocks_of_tile, (of.n_values - done) / 32); };
    const auto   hold     = [&](int done) { return sums.template hold<type>(first + done, n_blocks(done)); };
    [[maybe_unused]] typename sums_type::held x;
    if constexpr (sums_type::is_ahead) {
        x = hold(0);
    }
    arrived();
    prepare<type>(slot, made, of, lane);
#pragma unroll 1
    for (int done = 0; done < of.n_values; done += tile_values) {
        if constexpr (sums_type::is_ahead) {
            x = done == 0 ? x : hold(done);
            sums.template add<type>(a, b, x, first + done, n_blocks(done));
        } else {
            sums.template add<type>(a, b, hold(done), first + done, n_blocks(done));
        }
        a += tiled<type>::bytes(tile_values);
        b += tiled<type>::bytes(tile_values);
    }
}

// How a block multiplies tiles: the slots of its warps in shared memory, n_slots each.
struct tile_plan {
    int n_slots, slots_of_a_warp; // bytes, with the place where byte tiles are made
    int grids_at;                 // in the block's memory: where grids begin, if a type has one
};

constexpr int most_slots = 2; // of a warp: strips_of_warp has one or both

// A warp's part of strips 0 .. n - 1 of `width` values a row, in turn: pieces first, first + step, ... of each.
// strip_of(i) is strip i. While a piece is multiplied the next one is on its way.
template <ggml_type type, typename strips_type> class strips_of_warp {
  public:
    // Asks for the first pieces.
    __device__ __forceinline__ strips_of_warp(char * slots, int n_slots, int n, int width, int first, int step,
                                              strips_type strip_of) :
        slots_(slots + tiled<type>::made_bytes),
        has_two_(n_slots > 1),
        n_(first * tiled<type>::n_values < width ? n : 0),
        width_(width),
        first_(first * tiled<type>::n_values),
        step_(step * tiled<type>::n_values),
        value_(first_),
        strip_of_(strip_of) {
        if (n_ > 0) {
            asked_ = strip_of_(0);
        }
#pragma unroll 1
        for (int i = 0; i < n_slots; ++i) {
            ask();
        }
    }

    // sums += strip i, the next one
    template <typename sums_type> __device__ __forceinline__ void multiply(sums_type & sums, int i) {
        const strip of = strip_of_(i);
#pragma unroll 1
        for (int value = first_; value < width_; value += step_) {
            multiply_piece<type>(sums, slots_ + read_, slots_ + tiled<type>::read_at, of.piece<type>(value), value,
                                 threadIdx.x % 32, [&] { wait(); });
            read_ = next(read_);
            __syncwarp();
            ask();
        }
    }

    // The same for one column, whose values of a tile are asked for while the tile before is multiplied.
    template <typename sums_type> __device__ __forceinline__ void multiply_ahead(sums_type & sums, int i) {
        using tile           = tiled<type>;
        const strip of       = strip_of_(i);
        const int   row      = threadIdx.x % 32 / 4;
        const auto  n_blocks = [&](int value) { return min(blocks_of_tile, (width_ - value) / 32); };
        if (first_ >= width_) {
            return;
        }
        auto x = sums.template hold<type>(first_, n_blocks(first_));
#pragma unroll 1
        for (int value = first_; value < width_; value += step_) {
            wait();
            const strip  piece = of.piece<type>(value);
            const char * slot  = slots_ + (tile::is_made ? 0 : read_) + tile::read_at + row * tile::read_pitch;
            const char * a     = slot + tile::read_offset(piece.row(row));
            const char * b     = slot + 8 * tile::read_pitch + tile::read_offset(piece.row(row + 8));
            prepare<type>(slots_ + read_, slots_ + tile::read_at, piece, threadIdx.x % 32);
#pragma unroll 1
            for (int done = 0; done < piece.n_values; done += tile_values) {
                const int at    = value + done,
                          after = done + tile_values < piece.n_values ? at + tile_values : value + step_;
                const auto then = after < width_ ? sums.template hold<type>(after, n_blocks(after)) : x;
                sums.template add<type>(a, b, x, at, n_blocks(at));
                a += tiled<type>::bytes(tile_values);
                b += tiled<type>::bytes(tile_values);
                x = then;
            }
            read_ = next(read_);
            __syncwarp();
            ask();
        }
    }

    // Whether all pieces are on their way, and are n_tiles whole tiles of each strip.
    template <int n_tiles> __device__ __forceinline__ bool are_asked() const {
        return i_ >= n_ && value_of(n_tiles - 1) + tile_values <= width_ && value_of(n_tiles) >= width_;
    }

    // call(i, sums) with each strip's sums, which begin as `none`, if are_asked<n_tiles>(): columns are read once, when
    // ready() has waited for them. rehearses: the first strip is multiplied once before, so that the instructions are
    // in caches. Copies may still arrive then, so what is read is arbitrary, and call() gets sums that do not count.
    template <int n_tiles, bool rehearses, typename sums_type, typename ready_type, typename call_type>
    __device__ __forceinline__ void multiply_asked(const sums_type & none, ready_type && ready,
                                                   call_type && call) const {
        using tile                          = tiled<type>;
        constexpr int            n_slots    = (n_tiles + n_at_once - 1) / n_at_once; // of a strip
        const int                row        = threadIdx.x % 32 / 4;
        typename sums_type::held x[n_tiles] = {};
#pragma unroll 1
        for (int pass = rehearses ? -1 : 0; pass < n_; ++pass) {
            if (pass == 0) {
                ready();
#pragma unroll
                for (int t = 0; t < n_tiles; ++t) {
                    x[t] = none.template hold<type>(value_of(t), blocks_of_tile);
                }
                wait_for_requests<0>();
            }
            const int    i = max(pass, 0);
            const char * slot =
                slots_ + (tile::is_made ? 0 : i * n_slots * tile::slot_bytes) + tile::read_at + row * tile::read_pitch;
            sums_type   sums = none;
            const strip of   = strip_of_(i);
#pragma unroll
            for (int t = 0; t < n_tiles; ++t) {
                const strip  piece = of.piece<type>(value_of(t - t % n_at_once)); // of the slot
                const char * at    = slot + tile::bytes(t % n_at_once * tile_values);
                prepare<type>(slots_ + (i * n_slots + t / n_at_once) * tile::slot_bytes, slots_ + tile::read_at, piece,
                              threadIdx.x % 32);
                sums.template add<type>(at + tile::read_offset(piece.row(row)),
                                        at + 8 * tile::read_pitch + tile::read_offset(piece.row(row + 8)), x[t],
                                        value_of(t), blocks_of_tile);
                slot += !tile::is_made && (t + 1) % n_at_once == 0 ? tile::slot_bytes : 0;
            }
            call(i, sums);
        }
    }

  private:
    static constexpr int n_at_once = tiled<type>::n_values / tile_values;

    // for the piece that is read next
    __device__ __forceinline__ void wait() const {
        if (has_two_) {
            wait_for_requests<1>();
        } else {
            wait_for_requests<0>();
        }
    }

    // the first value of this warp's tile t of a strip
    __device__ __forceinline__ int value_of(int t) const {
        return first_ + t / n_at_once * step_ + t % n_at_once * tile_values;
    }
    __device__ __forceinline__ int next(int slot) const { return has_two_ ? tiled<type>::slot_bytes - slot : 0; }

    // Each call ends a request, so that waiting for all but the last one is waiting for the piece that is next.
    __device__ __forceinline__ void ask() {
        if (i_ < n_) {
            ask_for<type>(ptx::address_of(slots_) + write_, asked_.template piece<type>(value_), threadIdx.x % 32);
            write_ = next(write_);
            value_ += step_;
            if (value_ >= width_) {
                value_ = first_;
                if (++i_ < n_) {
                    asked_ = strip_of_(i_);
                }
            }
        }
        ptx::end_of_copies();
    }

    char *      slots_;
    bool        has_two_;
    int         n_, width_, first_, step_; // values
    int         i_ = 0, value_;            // what to ask for next: number of its strip, value
    strip       asked_;                    // strip i_
    int         read_ = 0, write_ = 0;     // slots, in bytes
    strips_type strip_of_;
};

} // namespace dw::layer_parts
