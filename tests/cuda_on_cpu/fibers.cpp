// See fibers.h.

#include "fibers.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

namespace {

constexpr size_t stack_bytes = 256 * 1024;

enum class waits_for { nobody, warp, block, nothing_more };

struct fiber {
    std::vector<char> stack = std::vector<char>(stack_bytes);
    ucontext_t        begin;
    jmp_buf           at;
    bool              begun = false;
    waits_for         state = waits_for::nobody;
    dim3              index;
    int               n_exchanges = 0;
};

struct warp {
    alignas(64) char slots[2][warp_size][64];
};

alignas(128) char memory[shared_bytes]; // dynamic shared memory

std::vector<fiber>            threads;
std::vector<warp>             warps;
int                           n_threads, now;
const std::function<void()> * body;
jmp_buf                       scheduler;
int                           counted; // of __syncthreads_count

// The first turn comes by way of ucontext, the others by jumps, which make no system calls.
void enter() {
    (*body)();
    threads[now].state = waits_for::nothing_more;
    _longjmp(scheduler, 1);
}

void wait_for(waits_for whom) {
    threads[now].state = whom;
    if (_setjmp(threads[now].at) == 0) {
        _longjmp(scheduler, 1);
    }
}

void turn_of(int i) {
    fiber & next = threads[i];
    now          = i;
    threadIdx    = next.index;
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (next.begun) {
        _longjmp(next.at, 1);
    }
    next.begun = true;
    setcontext(&next.begin);
}

// all of these that are left wait for the same; they go on
bool met(int first, int end, waits_for whom) {
    bool any = false;
    for (int i = first; i < end; ++i) {
        if (threads[i].state != whom && threads[i].state != waits_for::nothing_more) {
            return false;
        }
        any = any || threads[i].state == whom;
    }
    for (int i = first; any && i < end; ++i) {
        if (threads[i].state == whom) {
            threads[i].state = waits_for::nobody;
        }
    }
    return any;
}

void begin_block() {
    n_threads = (int) (blockDim.x * blockDim.y * blockDim.z);
    if ((int) threads.size() < n_threads) {
        threads.resize(n_threads);
        warps.resize((n_threads + warp_size - 1) / warp_size);
    }
    for (int i = 0; i < n_threads; ++i) {
        fiber & each = threads[i];
        each.begun   = false;
        each.state   = waits_for::nobody;
        each.index   = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
        each.n_exchanges = 0;
        getcontext(&each.begin);
        each.begin.uc_stack.ss_sp   = each.stack.data();
        each.begin.uc_stack.ss_size = stack_bytes;
        each.begin.uc_link          = nullptr;
        makecontext(&each.begin, enter, 0);
    }
}

void run_block() {
    begin_block();
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (int first = 0; first < n_threads; first += warp_size) {
            const int end = first + warp_size < n_threads ? first + warp_size : n_threads;
            do {
                for (int i = first; i < end; ++i) {
                    if (threads[i].state == waits_for::nobody) {
                        turn_of(i);
                        goes_on = true;
                    }
                }
            } while (met(first, end, waits_for::warp));
        }
        goes_on = met(0, n_threads, waits_for::block) || goes_on;
    }
    for (now = 0; now < n_threads; ++now) {
        if (threads[now].state != waits_for::nothing_more) {
            fail("threads wait at different barriers");
        }
    }
}

} // namespace

void fail(const char * what) {
    std::fprintf(stderr, "cuda_on_cpu: %s: thread (%u, %u, %u) of block (%u, %u, %u)\n", what, threadIdx.x, threadIdx.y,
                 threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    std::abort();
}

void * dynamic_memory() {
    return memory;
}

int lane() {
    return now % warp_size;
}

uint32_t lanes_alive() {
    const int first = now - lane();
    uint32_t  alive = 0;
    for (int i = first; i < first + warp_size && i < n_threads; ++i) {
        alive |= (uint32_t) (threads[i].state != waits_for::nothing_more) << (i - first);
    }
    return alive;
}

void meet_block() {
    wait_for(waits_for::block);
}

void meet_warp() {
    wait_for(waits_for::warp);
}

// Two sets take turns: a lane that is ahead writes to the other one, and waits there for those that still read.
void * exchange_slots() {
    return warps[now / warp_size].slots[threads[now].n_exchanges++ % 2];
}

void run(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()> & f) {
    if (dynamic_bytes > shared_bytes) {
        fail("more dynamic shared memory than a block may have");
    }
    gridDim  = grid;
    blockDim = block;
    body     = &f;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                std::memset(memory, 0xff, dynamic_bytes);
                run_block();
            }
        }
    }
}

} // namespace cuda_on_cpu

int __syncthreads_count(int is_so) {
    using namespace cuda_on_cpu;
    meet_block();
    if (now == 0) {
        counted = 0;
    }
    meet_block();
    counted += is_so != 0;
    meet_block();
    return counted;
}
