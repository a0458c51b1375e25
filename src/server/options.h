// Flags of llama-server that are ours, beside --spec-type. One patched line of common/arg.cpp adds them, so that
// --help, environment variables and presets know them, too. Must not know: what becomes of them.
// Test: tests/server/test_limits.py, test_pool.py.

#pragma once

#include "arg.h"
#include "common.h"

#include <stdexcept>
#include <string>

namespace draftwood {

inline int32_t at_least(int32_t least, int32_t value, const char * flag) {
    if (value < least) {
        throw std::invalid_argument(std::string(flag) + ": found " + std::to_string(value) + ", expected " +
                                    std::to_string(least) + " or more");
    }
    return value;
}

template <typename F> void add_http_options(F in_server, const common_params & params) {
    const auto by_default = [](int32_t value) { return " (default: " + std::to_string(value) + ")"; };
    in_server(common_arg({ "--http-connections" }, "N",
                         "connections that are open at a time; further ones get a 429" +
                             by_default(params.dw_http.connections),
                         [](common_params & params, int value) {
                             params.dw_http.connections = at_least(8, value, "--http-connections");
                         }),
              "LLAMA_ARG_HTTP_CONNECTIONS");
    in_server(
        common_arg({ "--http-head-time" }, "SECONDS",
                   "until the head of a request is complete, else it gets a 408" + by_default(params.dw_http.head_time),
                   [](common_params & params, int value) {
                       params.dw_http.head_time = at_least(1, value, "--http-head-time");
                   }),
        "LLAMA_ARG_HTTP_HEAD_TIME");
    in_server(
        common_arg({ "--http-stall-time" }, "SECONDS",
                   "that a client may send nothing of a body, then it gets a 408, or read nothing of a reply, then the "
                   "reply ends; --timeout can only shorten it" +
                       by_default(params.dw_http.stall_time),
                   [](common_params & params, int value) {
                       params.dw_http.stall_time = at_least(1, value, "--http-stall-time");
                   }),
        "LLAMA_ARG_HTTP_STALL_TIME");
    in_server(
        common_arg({ "--http-body" }, "MIB",
                   "size of a request's body; larger ones get a 413" + by_default(params.dw_http.body),
                   [](common_params & params, int value) { params.dw_http.body = at_least(1, value, "--http-body"); }),
        "LLAMA_ARG_HTTP_BODY");
}

template <typename F> void add_pool_options(F in_server) {
    in_server(common_arg({ "--expert-vram" }, "SIZE",
                         "bytes of the card for experts, such as 6GiB: all of them lie in host memory, and as many as "
                         "fit in slots on the card (default: no slots)",
                         [](common_params & params, const std::string & value) { params.dw_pool.take(value); }),
              "LLAMA_ARG_EXPERT_VRAM");
    in_server(common_arg({ "--expert-heat" }, "FILE",
                         "keep which experts are used most in this file, to begin with them (default: none)",
                         [](common_params & params, const std::string & value) { params.dw_pool.heat_file = value; }),
              "LLAMA_ARG_EXPERT_HEAT");
    in_server(common_arg({ "--expert-guess" }, { "--no-expert-guess" },
                         "fetch experts while the layer before theirs computes (default: on a card)",
                         [](common_params & params, bool value) { params.dw_pool.guess = value ? 1 : 0; }),
              "LLAMA_ARG_EXPERT_GUESS");
}

template <typename F> void add_options(F add, const common_params & params) {
    const auto in_server = [&add](common_arg arg, const char * variable) {
        add(arg.set_examples({ LLAMA_EXAMPLE_SERVER }).set_env(variable));
    };
    add_http_options(in_server, params);
    add_pool_options(in_server);
}

} // namespace draftwood
