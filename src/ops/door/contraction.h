// A probe of the flags that the CPU ops and ggml's own are compiled with (cmake/cpu-variants.cmake). The module exports
// it for tests/ops/test_contraction.py, which calls it with values whose fused result is another one.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// a * b rounded, plus c rounded
GGML_BACKEND_API float dw_product_and_sum(float a, float b, float c);

#ifdef __cplusplus
}
#endif
