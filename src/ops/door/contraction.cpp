// Whether the compiler fused a product with a sum that the source keeps apart: see contraction.h.

#include "ops/door/contraction.h"

float dw_product_and_sum(float a, float b, float c) {
    return a * b + c;
}
