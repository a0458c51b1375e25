// Text of the last failure, one per thread: see status.h.

#include "llama/status.h"

#include <cstdarg>
#include <cstdio>

namespace draftwood {

namespace {

// a fixed buffer, so that reporting an out-of-memory failure cannot fail itself
thread_local char g_last_error[1024] = "";

} // namespace

void fail(dw_status code, const char * format, ...) {
    char    text[sizeof(g_last_error)];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw failure(code, text);
}

void set_last_error(const char * text) noexcept {
    std::snprintf(g_last_error, sizeof(g_last_error), "%s", text ? text : "");
}

const char * last_error() noexcept {
    return g_last_error;
}

} // namespace draftwood
