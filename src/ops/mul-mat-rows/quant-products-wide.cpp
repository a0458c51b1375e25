// Quantised products with the widest vectors of this CPU: quant-products.h.

#include "ops/mul-mat-rows/quant-products.h"

#ifdef DW_QUANT_LANES

void dw::quant_products_wide(ggml_type type, const quant_product & m, int ith, int nth) {
    DW_QUANT_NAMESPACE::products(type, m, ith, nth);
}

#endif
