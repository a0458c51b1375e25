// Flags of llama-server that are ours, beside --spec-type. One patched line of common/arg.cpp adds them, so that
// --help, environment variables and presets know them, too. Must not know: what becomes of them.
// Test: tests/server/test_limits.py, test_pool.py.

#pragma once

#include "arg.h"
#include "common.h"

#include <stdexcept>
#include <string>

namespace draftwood {

// llama.cpp says in front of an error which flag it is about.
template <int32_t dw_http_limits::* field, int32_t least> void take_limit(common_params & params, int value) {
    if (value < least) {
        throw std::invalid_argument("found " + std::to_string(value) + ", expected " + std::to_string(least) +
                                    " or more");
    }
    params.dw_http.*field = value;
}

template <typename F> void add_http_options(F in_server, const common_params & params) {
    using limits   = dw_http_limits;
    const auto add = [&](const char * flag, const char * unit, const char * variable, const std::string & help,
                         int32_t by_default, void (*take)(common_params &, int)) {
        const std::string words = help + " (default: " + std::to_string(by_default) + ")";
        in_server(common_arg({ flag }, unit, words, take), variable);
    };
    const limits & usual = params.dw_http;
    add("--http-connections", "N", "LLAMA_ARG_HTTP_CONNECTIONS",
        "connections that are open at a time; further ones get a 429", usual.connections,
        take_limit<&limits::connections, 8>);
    add("--http-head-time", "SECONDS", "LLAMA_ARG_HTTP_HEAD_TIME",
        "until the head of a request is complete, else it gets a 408", usual.head_time,
        take_limit<&limits::head_time, 1>);
    add("--http-stall-time", "SECONDS", "LLAMA_ARG_HTTP_STALL_TIME",
        "that a client may send nothing of a body, then it gets a 408, or read nothing of a reply, then the reply "
        "ends; "
        "--timeout can only shorten it",
        usual.stall_time, take_limit<&limits::stall_time, 1>);
    add("--http-body", "MIB", "LLAMA_ARG_HTTP_BODY", "size of a request's body; larger ones get a 413", usual.body,
        take_limit<&limits::body, 1>);
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
