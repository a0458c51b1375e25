// Blocks of all quantised types that products read: unpack-words.cuh says what a type has.

#pragma once

#include "ops/layer-parts/byte-tiles.cuh"
#include "ops/layer-parts/unpack-blocks.cuh"
#include "ops/layer-parts/unpack-k.cuh"
