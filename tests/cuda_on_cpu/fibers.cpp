// See fibers.h.

#include "fibers.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

namespace {

constexpr size_t stack_bytes = 256 * 1024;
constexpr int    max_threads = 1024;

enum class waits_for { nobody, warp, block, barrier, turn, nothing_more };

struct late_copy {
    void *       to;
    const void * from;
    size_t       n_bytes;
    int          group;
};

struct late_span {
    void *       to;
    const void * from;
    size_t       n_bytes;
    arrivals *   at;
};

// Lives as long as the process, and runs a thread of each block.
struct fiber {
    std::unique_ptr<char[]> stack;
    ucontext_t              begin;
    jmp_buf                 at;
    bool                    begun = false;
    waits_for               state = waits_for::nobody;
    dim3                    index;
    int                     barrier = 0, n_of_barrier = 0; // waits_for::barrier: its number, and how many meet there
    const arrivals *        arriving = nullptr;            // waits_for::turn: where it is counted, and the turn
    int                     turn     = 0;
    int                     n_exchanges = 0;
    std::vector<late_copy>  copies;
    int                     n_groups = 0; // of copies, that were ended
};

struct warp {
    alignas(64) char slots[2][warp_size][64];
};

alignas(128) char memory[shared_bytes]; // dynamic shared memory

fiber                         threads[max_threads];
warp                          warps[max_threads / warp_size];
int                           n_threads, now;
const std::function<void()> * body;
jmp_buf                       scheduler;
int                           counted;  // of __syncthreads_count
std::vector<late_span>        spans;    // that have not come
std::vector<void *>           poisoned; // shared variables that this block has met

// Whether the next turns are taken from the last warp or lane to the first. `order` is CUDA_ON_CPU_ORDER.
class turns {
  public:
    void follow(const char * order) {
        if (order_ != order) {
            order_ = order;
            state_ = std::strtoull(order, nullptr, 10);
        }
    }

    bool backward() {
        if (order_ == "forward" || order_ == "reverse") {
            return order_ == "reverse";
        }
        state_ = state_ * 6364136223846793005 + 1442695040888963407;
        return state_ >> 63 != 0;
    }

  private:
    std::string order_;
    uint64_t    state_ = 0; // of the seed's random numbers
} turns_of;

void wait_for(waits_for whom) {
    threads[now].state = whom;
    if (_setjmp(threads[now].at) == 0) {
        _longjmp(scheduler, 1);
    }
}

// A fiber's first turn ever comes by way of ucontext, the others by jumps, which make no system calls.
void enter() {
    for (;;) {
        (*body)();
        wait_for(waits_for::nothing_more);
    }
}

void make(fiber & each) {
    each.stack.reset(new char[stack_bytes]);
    getcontext(&each.begin);
    each.begin.uc_stack.ss_sp   = each.stack.get();
    each.begin.uc_stack.ss_size = stack_bytes;
    each.begin.uc_link          = nullptr;
    makecontext(&each.begin, enter, 0);
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
    make(next);
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

// the threads of a barrier of the block, if all have come, go on
bool met_at_barriers() {
    std::vector<int> waiting[16];
    for (int i = 0; i < n_threads; ++i) {
        if (threads[i].state == waits_for::barrier) {
            waiting[threads[i].barrier].push_back(i);
        }
    }
    bool any = false;
    for (const std::vector<int> & of : waiting) {
        for (int i : of) {
            if (threads[i].n_of_barrier != threads[of[0]].n_of_barrier) {
                fail("threads at a barrier say that different numbers of them meet there");
            }
        }
        if (!of.empty() && (int) of.size() == threads[of[0]].n_of_barrier) {
            for (int i : of) {
                threads[i].state = waits_for::nobody;
            }
            any = true;
        }
    }
    return any;
}

bool has_come(const fiber & each) {
    return each.arriving->n_turns % 2 != each.turn % 2;
}

// the threads whose turn has come go on
bool met_at_spans() {
    bool any = false;
    for (int i = 0; i < n_threads; ++i) {
        if (threads[i].state == waits_for::turn && has_come(threads[i])) {
            threads[i].state = waits_for::nobody;
            any              = true;
        }
    }
    return any;
}

void come(const late_span & each) {
    std::memcpy(each.to, each.from, each.n_bytes);
    if (++each.at->n_come == each.at->n_copies) {
        each.at->n_come = 0;
        ++each.at->n_turns;
    }
}

void begin_block() {
    poisoned.clear();
    spans.clear();
    for (int i = 0; i < n_threads; ++i) {
        fiber & each     = threads[i];
        each.state       = waits_for::nobody;
        each.index       = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
        each.n_exchanges = 0;
        each.n_groups    = 0;
        each.copies.clear();
    }
}

// until all its lanes wait for the block or have come to their end; false: they were there already
bool turns_of_warp(int first) {
    const int n       = std::min(warp_size, n_threads - first);
    bool      goes_on = false;
    do {
        const bool backward = turns_of.backward();
        for (int i = 0; i < n; ++i) {
            const int thread = first + (backward ? n - 1 - i : i);
            if (threads[thread].state == waits_for::nobody) {
                turn_of(thread);
                goes_on = true;
            }
        }
    } while (met(first, first + n, waits_for::warp));
    return goes_on;
}

void run_block() {
    begin_block();
    const int n_warps = (n_threads + warp_size - 1) / warp_size;
    for (bool goes_on = true; goes_on;) {
        goes_on             = false;
        const bool backward = turns_of.backward();
        for (int i = 0; i < n_warps; ++i) {
            goes_on = turns_of_warp((backward ? n_warps - 1 - i : i) * warp_size) || goes_on;
        }
        goes_on = met(0, n_threads, waits_for::block) || met_at_barriers() || met_at_spans() || goes_on;
        if (!goes_on && !spans.empty()) { // nobody can go on without them
            std::for_each(spans.begin(), spans.end(), come);
            spans.clear();
            goes_on = true;
        }
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

void poison(void * at, size_t n_bytes) {
    if (std::find(poisoned.begin(), poisoned.end(), at) == poisoned.end()) {
        poisoned.push_back(at);
        std::memset(at, 0xff, n_bytes);
    }
}

void copy(void * to, const void * from, size_t n_bytes) {
    if (turns_of.backward()) {
        threads[now].copies.push_back({ to, from, n_bytes, threads[now].n_groups });
    } else {
        std::memcpy(to, from, n_bytes);
    }
}

void end_of_copies() {
    ++threads[now].n_groups;
}

void wait_for_copies(int n_open) {
    std::vector<late_copy> & copies = threads[now].copies;
    const auto is_due = [&](const late_copy & each) { return each.group < threads[now].n_groups - n_open; };
    for (const late_copy & each : copies) {
        if (is_due(each)) {
            std::memcpy(each.to, each.from, each.n_bytes);
        }
    }
    copies.erase(std::remove_if(copies.begin(), copies.end(), is_due), copies.end());
}

void copy(void * to, const void * from, size_t n_bytes, arrivals * at) {
    const late_span each{ to, from, n_bytes, at };
    if (turns_of.backward()) {
        spans.push_back(each);
    } else {
        come(each);
    }
}

void wait_for_turn(const arrivals * at, int turn) {
    threads[now].arriving = at;
    threads[now].turn     = turn;
    if (!has_come(threads[now])) {
        wait_for(waits_for::turn);
    }
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

void meet(int number, int of_how_many) {
    if (number < 1 || number > 15 || of_how_many % warp_size != 0) {
        fail("a barrier that is not one of 1 to 15, or not of whole warps");
    }
    threads[now].barrier      = number;
    threads[now].n_of_barrier = of_how_many;
    wait_for(waits_for::barrier);
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
    if (block.x * block.y * block.z > (unsigned) max_threads) {
        fail("more threads than a block may have");
    }
    const char * order = std::getenv("CUDA_ON_CPU_ORDER");
    turns_of.follow(order ? order : "forward");
    gridDim   = grid;
    blockDim  = block;
    body      = &f;
    n_threads = (int) (block.x * block.y * block.z);
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
