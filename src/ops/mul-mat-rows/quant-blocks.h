// ggml's blocks, from its own header. Test: tests/ops/test_quant_rows.py.

#pragma once

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
