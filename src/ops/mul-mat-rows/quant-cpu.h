// Which vectors quantised products have on this CPU. Test: tests/ops/test_quant_rows.py.

#pragma once

// DW_QUANT_WIDEST: weight rows side by side; not defined: no products here. DW_QUANT_HAS_NARROW: 8 of them beside 16.
// DW_VNNI: unsigned bytes times signed ones, four at a time.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__) && defined(__FMA__)
#define DW_QUANT_WIDEST 16
#define DW_QUANT_HAS_NARROW
#if defined(__AVX512VNNI__)
#define DW_VNNI
#endif
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define DW_QUANT_WIDEST 8
#if defined(__AVXVNNI__)
#define DW_VNNI
#endif
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define DW_QUANT_WIDEST 4
#endif

namespace dw {

#ifdef DW_VNNI
constexpr bool is_vnni = true; // activations in blocks of 32 are unsigned then, 128 more than their value
#else
constexpr bool is_vnni = false;
#endif

} // namespace dw
