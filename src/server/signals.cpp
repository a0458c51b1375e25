// See signals.h.

#include "server/signals.h"

#ifndef _WIN32

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>

namespace draftwood {

namespace {

int ends[2]; // of a pipe: the signals' numbers

void pass_on(int signal) {
    const int           before = errno;
    const unsigned char number = (unsigned char) signal;
    if (write(ends[1], &number, 1) < 0) {
        // the pipe is full of signals
    }
    errno = before;
}

void wait_for_signals(void (*handler)(int)) {
    unsigned char number = 0;
    while (true) {
        const ssize_t n = read(ends[0], &number, 1);
        if (n == 1) {
            handler(number);
        } else if (n == 0 || errno != EINTR) {
            return;
        }
    }
}

} // namespace

void (*in_a_thread(void (*handler)(int)))(int) {
    if (pipe(ends) != 0) {
        throw std::system_error(errno, std::generic_category(), "no pipe for signals");
    }
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFD, FD_CLOEXEC);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    std::thread(wait_for_signals, handler).detach();
    return pass_on;
}

} // namespace draftwood

#endif
