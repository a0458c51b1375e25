// ggml's blocks, from its own header.

#pragma once

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
