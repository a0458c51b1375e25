// Flags of llama-server that are ours, beside --spec-type. One patched line of common/arg.cpp adds them, so that
// --help, environment variables and presets know them, too. Must not know: what becomes of them.
// Test: tests/server/test_limits.py.

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

template <typename F> void add_options(F add, const common_params & params) {
    const auto in_server = [&add](common_arg arg, const char * variable) {
        add(arg.set_examples({ LLAMA_EXAMPLE_SERVER }).set_env(variable));
    };
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

} // namespace draftwood
