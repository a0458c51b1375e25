// dw_expert_readahead: expert-readahead.h. Threads share the experts.

#include "ops/expert-readahead/expert-readahead.h"

#include <algorithm>
#include <bitset>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace dw::expert_readahead {

namespace {

using expert_set = std::bitset<max_experts>;

// the chosen experts; copies the choice
expert_set chosen(const ggml_tensor * from, int32_t * to) {
    expert_set found;
    for (int64_t row = 0; row < from->ne[1]; ++row) {
        for (int64_t i = 0; i < from->ne[0]; ++i) {
            const int32_t id   = *(const int32_t *) ((const char *) from->data + row * from->nb[1] + i * from->nb[0]);
            found[(size_t) id] = true;
            if (to) {
                *to++ = id;
            }
        }
    }
    return found;
}

#if defined(__linux__)

constexpr int64_t pages_at_once = 1024;

// of up to pages_at_once pages those that are not in memory
int64_t n_absent(char * first, int64_t n_pages, int64_t page) {
    unsigned char is_there[pages_at_once];
    if (mincore(first, (size_t) (n_pages * page), is_there) != 0) {
        return 0;
    }
    return std::count_if(is_there, is_there + n_pages, [](unsigned char each) { return (each & 1) == 0; });
}

// The kernel cuts a request to the disk's largest one, or to its readahead if that is more.
void ask_for(char * first, char * last) {
    constexpr int64_t piece = 256 << 10;
    for (char * at = first; at < last; at += piece) {
        madvise(at, (size_t) std::min<int64_t>(piece, last - at), MADV_WILLNEED);
    }
}

// Returns the bytes that were not there and are on their way now; 0 without may_look.
int64_t read_ahead(const char * data, int64_t n_bytes, bool may_look) {
    static const int64_t page    = sysconf(_SC_PAGESIZE);
    char * const         first   = (char *) ((uintptr_t) data / page * page);
    char * const         last    = (char *) (((uintptr_t) data + n_bytes + page - 1) / page * page);
    int64_t              n_asked = 0;
    for (char * at = first; at < last; at += pages_at_once * page) {
        const int64_t n_pages = std::min(pages_at_once, (last - at) / page);
        const int64_t missing = may_look ? n_absent(at, n_pages, page) : 0;
        if (missing > 0 || !may_look) {
            ask_for(at, at + n_pages * page);
        }
        n_asked += missing;
    }
    return n_asked * page;
}

// Pages of an asked-for expert that went again are read alone: around them the kernel would read what nobody chose.
void expect(const layer & of, bool random) {
    if (of.is_random.exchange(random) == random) {
        return;
    }
    for (int32_t p = 0; p < of.n_parts; ++p) {
        const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t first = ((uintptr_t) of.parts[p].base + page - 1) / page * page;
        const uintptr_t last  = ((uintptr_t) of.parts[p].base + of.n_experts * of.parts[p].stride) / page * page;
        if (first < last) {
            madvise((void *) first, last - first, random ? MADV_RANDOM : MADV_NORMAL);
        }
    }
}

#else

void expect(const layer &, bool) {}

int64_t read_ahead(const char *, int64_t, bool) {
    return 0;
}

#endif

void compute(ggml_tensor * dst, int ith, int nth, void *) {
    const layer &    of     = *(const layer *) layer_of(dst);
    const expert_set used   = chosen(dst->src[ids], ith == 0 ? (int32_t *) dst->data : nullptr);
    const bool       is_few = dst->ne[1] <= max_rows;
    int64_t          n_read = 0, bytes_read = 0;
    int32_t          turn = 0;
    for (int32_t expert = 0; is_few && expert < of.n_experts; ++expert) {
        if (!used[(size_t) expert] || turn++ % nth != ith) {
            continue;
        }
        int64_t n_bytes = 0;
        for (int32_t p = 0; p < of.n_parts; ++p) {
            n_bytes += read_ahead(of.parts[p].base + expert * of.parts[p].stride, of.parts[p].stride, of.may_look);
        }
        n_read += n_bytes > 0 ? 1 : 0;
        bytes_read += n_bytes;
    }
    of.n_experts_read += n_read;
    of.bytes_read += bytes_read;
    if (ith == 0) {
        expect(of, is_few);
        of.n_steps++;
        of.n_experts_used += (int64_t) used.count();
    }
}

} // namespace

const op_descriptor on_cpu = { signature, compute, nullptr, nullptr, nullptr };

} // namespace dw::expert_readahead
