// See launches.h.

#include "llama/launches.h"

#include "ggml-backend.h"
#include "ops/door/door.h"

namespace draftwood {

launches gpu_launches() {
    static const dw_cuda_launches_t count = [] {
        void * found = nullptr;
        for (size_t i = 0; i < ggml_backend_reg_count() && !found; ++i) {
            found = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), "dw_cuda_launches");
        }
        return (dw_cuda_launches_t) found;
    }();
    if (!count) {
        return {};
    }
    const dw_cuda_launches counted = count();
    return { counted.all, counted.replayed };
}

} // namespace draftwood
