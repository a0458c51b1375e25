// Stands in for ggml-cuda's header of this name.

#pragma once

#include "common.cuh"

// For each of the 8 digits of q4 the byte of a table of 16: those of low digits, then those of high ones.
inline int2 get_int_from_table_16(int q4, const int8_t * table) {
    uint32_t low = 0, high = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t byte = (uint32_t) q4 >> (8 * i) & 0xff;
        low |= (uint32_t) (uint8_t) table[byte & 15] << (8 * i);
        high |= (uint32_t) (uint8_t) table[byte >> 4] << (8 * i);
    }
    return make_int2((int) low, (int) high);
}
