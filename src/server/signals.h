// Signals that end llama-server. Its handler locks mutexes, which the interrupted thread may hold, so that now and then
// a server never ended. Must not know: what the handler does. Test: tests/server/test_limits.py.

#pragma once

namespace draftwood {

// Returns a signal handler that has `handler` called in a thread of its own. Call it once. POSIX.
void (*in_a_thread(void (*handler)(int)))(int);

} // namespace draftwood
