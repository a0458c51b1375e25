// Quantised products with half of AVX-512, for one or two rows of activations: fewer weight rows side by side are fewer
// streams from memory. See quant-products.h.

#define DW_QUANT_NARROW
#include "ops/mul-mat-rows/quant-products.h"

#ifdef DW_QUANT_LANES

void dw::quant_products_narrow(ggml_type type, const quant_product & m, int ith, int nth) {
    DW_QUANT_NAMESPACE::products(type, m, ith, nth);
}

#endif
