// For ggml-cpu/amx/mmq.cpp by GCC before 14, whose _tile_loadconfig names 8 of the 64 bytes that it reads (GCC bug
// 114098): the stores of the others were removed, and the processor refused the configuration. Our build includes it in
// front of that file, bench/pristine.py in front of all. Test: tests/model/test_synth_routing.py, on a CPU with AMX.

#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char(*)[64])(config)))
#endif
