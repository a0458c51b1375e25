// Failures inside the engine, and the line that no exception crosses.
// Internal code throws `failure`; `guard` turns whatever was thrown into a dw_status and a text.
// Test: tests/model/engine/test_arguments.py, test_failures.py.

#pragma once

#include "draftwood.h"

#include <exception>
#include <string>
#include <utility>

namespace draftwood {

class failure : public std::exception {
  public:
    failure(dw_status code, std::string text) :
        code_(code),
        text_(std::move(text)) {}

    dw_status    code() const noexcept { return code_; }
    const char * what() const noexcept override { return text_.c_str(); }

  private:
    dw_status   code_;
    std::string text_;
};

// throw a failure with a printf-style text: what was found, what was expected, the fix
[[noreturn]]
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void fail(dw_status code, const char * format, ...);

void         set_last_error(const char * text) noexcept;
const char * last_error() noexcept;

// run `body`, which returns a dw_status; an exception becomes a status with its text kept for dw_last_error
template <typename F> dw_status guard(F && body) noexcept {
    try {
        return body();
    } catch (const failure & e) {
        set_last_error(e.what());
        return e.code();
    } catch (const std::exception & e) {
        set_last_error(e.what());
    } catch (...) {
        set_last_error("an exception of unknown type");
    }
    return DW_ERR_INTERNAL;
}

} // namespace draftwood
