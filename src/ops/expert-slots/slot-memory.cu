// slot-memory.h on CUDA: virtual address ranges, pinned host memory and device memory mapped into them. Source: CUDA
// driver API, "Virtual Memory Management"; host locations need CUDA 12.2 and a driver of version 535.

#include "ops/expert-slots/slot-memory.h"

#include "common.cuh"
#include "ops/expert-slots/copy-streams.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/stage.h"

#include <cuda.h>
#include <new>

namespace {

bool is_ok(CUresult result) {
    return result == CUDA_SUCCESS;
}

// several of ggml's devices may share a card
int physical(int device) {
    return ggml_cuda_info().devices[device].physical_device;
}

CUmemAllocationProp on_device(int device) {
    CUmemAllocationProp prop = {};
    prop.type                = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location            = { CU_MEM_LOCATION_TYPE_DEVICE, physical(device) };
    return prop;
}

int attribute(int device, CUdevice_attribute which) {
    CUdevice found;
    int      value = 0;
    return is_ok(cuDeviceGet(&found, physical(device))) && is_ok(cuDeviceGetAttribute(&value, which, found)) ? value
                                                                                                             : 0;
}

CUmemAllocationProp on_host(int device) {
    CUmemAllocationProp prop = {};
    const int           node = attribute(device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
    prop.type                = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location            = { CU_MEM_LOCATION_TYPE_HOST_NUMA, node < 0 ? 0 : node };
    return prop;
}

size_t page_of(const CUmemAllocationProp & prop) {
    size_t bytes = 0;
    return is_ok(cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) ? bytes : 0;
}

size_t page(int device) {
    const size_t of_device = page_of(on_device(device)), of_host = page_of(on_host(device));
    return of_device > of_host ? of_device : of_host; // both are powers of two
}

const char * refusal(int device) {
    ggml_cuda_set_device(device);
    if (!ggml_cuda_info().devices[device].vmm) {
        return "this card has no virtual memory management";
    }
    if (!attribute(device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) || page(device) == 0) {
        return "its driver cannot map host memory into the card's addresses (version 535 or newer can, on Linux)";
    }
    return nullptr;
}

CUmemAccessDesc reader(CUmemLocation location) {
    return { location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
}

bool map_handle(void * at, size_t n_bytes, CUmemGenericAllocationHandle handle, const CUmemAccessDesc * readers,
                size_t n_readers) {
    const auto address = (CUdeviceptr) at;
    if (!is_ok(cuMemMap(address, n_bytes, 0, handle, 0))) {
        return false;
    }
    if (!is_ok(cuMemSetAccess(address, n_bytes, readers, n_readers))) {
        cuMemUnmap(address, n_bytes);
        return false;
    }
    return true;
}

bool map(void * at, size_t n_bytes, const CUmemAllocationProp & prop, const CUmemAccessDesc * readers,
         size_t n_readers) {
    CUmemGenericAllocationHandle handle;
    if (!is_ok(cuMemCreate(&handle, n_bytes, &prop, 0))) {
        return false;
    }
    const bool mapped = map_handle(at, n_bytes, handle, readers, n_readers);
    cuMemRelease(handle); // the mapping holds the memory
    return mapped;
}

bool map_host(int device, void * at, size_t n_bytes) {
    ggml_cuda_set_device(device);
    const CUmemAllocationProp prop      = on_host(device);
    const CUmemAccessDesc     readers[] = { reader(on_device(device).location), reader(prop.location) };
    return map(at, n_bytes, prop, readers, 2);
}

// Of memory that was mapped just now; without success it is unmapped again.
bool zero(void * at, size_t n_bytes) {
    const bool done = cudaMemsetAsync(at, 0, n_bytes, cudaStreamPerThread) == cudaSuccess &&
                      cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess;
    return done || (cudaGetLastError(), false);
}

// of memory that map() mapped
bool zero_or_unmap(void * at, size_t n_bytes) {
    const bool done = zero(at, n_bytes);
    if (!done) {
        cuMemUnmap((CUdeviceptr) at, n_bytes);
    }
    return done;
}

bool map_device(int device, void * at, size_t n_bytes) {
    ggml_cuda_set_device(device);
    const CUmemAllocationProp prop      = on_device(device);
    const CUmemAccessDesc     readers[] = { reader(prop.location) };
    return map(at, n_bytes, prop, readers, 1) && zero_or_unmap(at, n_bytes);
}

void * reserve(int device, size_t n_bytes) {
    ggml_cuda_set_device(device);
    CUdeviceptr at = 0;
    return is_ok(cuMemAddressReserve(&at, n_bytes, page(device), 0, 0)) ? (void *) at : nullptr;
}

void unmap(int device, void * at, size_t n_bytes) {
    ggml_cuda_set_device(device);
    cuMemUnmap((CUdeviceptr) at, n_bytes);
}

void release(int, void * at, size_t n_bytes) {
    cuMemAddressFree((CUdeviceptr) at, n_bytes);
}

void * create(int device, size_t n_bytes) {
    ggml_cuda_set_device(device);
    const CUmemAllocationProp    prop = on_device(device);
    CUmemGenericAllocationHandle handle;
    return is_ok(cuMemCreate(&handle, n_bytes, &prop, 0)) ? (void *) handle : nullptr;
}

bool map_shared(int device, void * at, size_t n_bytes, void * memory) {
    ggml_cuda_set_device(device);
    const CUmemAccessDesc readers[] = { reader(on_device(device).location) };
    return map_handle(at, n_bytes, (CUmemGenericAllocationHandle) memory, readers, 1) && zero_or_unmap(at, n_bytes);
}

void destroy(int device, void * memory) {
    ggml_cuda_set_device(device);
    cuMemRelease((CUmemGenericAllocationHandle) memory);
}

void free_stage(int device, dw::expert_slots::stage * stage) {
    if (!stage) {
        return;
    }
    ggml_cuda_set_device(device);
    for (cudaEvent_t event : { stage->is_free, stage->is_ready[0], stage->is_ready[1] }) {
        if (event) {
            cudaEventDestroy(event);
        }
    }
    if (stage->stream) {
        cudaStreamDestroy(stage->stream);
    }
    delete stage;
}

dw::expert_slots::stage * make_stage(int device) {
    ggml_cuda_set_device(device);
    auto * stage = new (std::nothrow) dw::expert_slots::stage();
    if (!stage) {
        return nullptr;
    }
    bool made = cudaStreamCreateWithFlags(&stage->stream, cudaStreamNonBlocking) == cudaSuccess;
    for (cudaEvent_t * event : { &stage->is_free, &stage->is_ready[0], &stage->is_ready[1] }) {
        made = made && cudaEventCreateWithFlags(event, cudaEventDisableTiming) == cudaSuccess;
    }
    if (!made) {
        (void) cudaGetLastError();
        free_stage(device, stage);
        return nullptr;
    }
    return stage;
}

void free_streams(int device, dw::expert_slots::copy_streams * copies) {
    if (!copies) {
        return;
    }
    ggml_cuda_set_device(device);
    cudaFree(copies->logits);
    for (cudaEvent_t event :
         { copies->is_chosen, copies->is_filled, copies->is_hidden, copies->is_fetched, copies->is_found }) {
        if (event) {
            cudaEventDestroy(event);
        }
    }
    for (cudaStream_t stream : { copies->stream, copies->finding }) {
        if (stream) {
            cudaStreamDestroy(stream);
        }
    }
    delete copies;
}

dw::expert_slots::copy_streams * make_streams(int device) {
    ggml_cuda_set_device(device);
    auto * copies = new (std::nothrow) dw::expert_slots::copy_streams();
    if (!copies) {
        return nullptr;
    }
    constexpr size_t n_logits = dw::expert_slots::max_guess_rows * dw::expert_slots::max_experts;
    int              lowest = 0, highest = 0; // a copy waits for the bus, not for what the step has queued
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    bool made = cudaMalloc(&copies->logits, n_logits * sizeof(float)) == cudaSuccess;
    for (cudaStream_t * stream : { &copies->stream, &copies->finding }) {
        made = made && cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest) == cudaSuccess;
    }
    for (cudaEvent_t * event :
         { &copies->is_chosen, &copies->is_filled, &copies->is_hidden, &copies->is_fetched, &copies->is_found }) {
        made = made && cudaEventCreateWithFlags(event, cudaEventDisableTiming) == cudaSuccess;
    }
    if (!made) {
        (void) cudaGetLastError();
        free_streams(device, copies);
        return nullptr;
    }
    return copies;
}

void * allocate(int device, size_t n_bytes) {
    ggml_cuda_set_device(device);
    void * at = nullptr;
    if (cudaMalloc(&at, n_bytes) != cudaSuccess) {
        (void) cudaGetLastError();
        return nullptr;
    }
    return zero(at, n_bytes) ? at : (cudaFree(at), nullptr);
}

void free_table(int device, void * at) {
    ggml_cuda_set_device(device);
    cudaFree(at);
}

bool copy(int device, void * to, const void * from, size_t n_bytes) {
    ggml_cuda_set_device(device);
    const bool done = cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDefault, cudaStreamPerThread) == cudaSuccess &&
                      cudaStreamSynchronize(cudaStreamPerThread) == cudaSuccess;
    return done || (cudaGetLastError(), false);
}

} // namespace

const dw::slot_memory dw::slot_memory_on_cuda = {
    refusal, page,     reserve,    map_host, map_device, unmap,      release,      create,       map_shared,
    destroy, allocate, free_table, copy,     make_stage, free_stage, make_streams, free_streams,
};
