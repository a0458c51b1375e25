// What llama-server takes from its clients: connections, time, bytes. llama.cpp's common_params hold it, so that it
// travels with the other arguments. Must not know: llama.cpp, sockets. Test: tests/server/test_limits.py.

#pragma once

#include <cstdint>

struct dw_http_limits {
    int32_t connections = 512; // open at a time
    int32_t head_time   = 10;  // seconds until a request's head is complete
    int32_t stall_time  = 60;  // seconds without a byte of a request's body, or without a byte of a reply being read
    int32_t body        = 32;  // MiB of a request's body
};
