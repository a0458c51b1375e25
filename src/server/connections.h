// Connections of llama-server between accept and a thread. A connection gets its thread when the head of its first
// request is complete, so one that sends nothing, or half a head, costs a socket. Some threads are kept for requests
// without a body: /health answers while others hold all the rest with half-sent bodies.
// A head that takes too long gets a 408, one larger than 16 KiB a 431, a connection or body too many a 429. Later
// requests of a connection are read by its thread, under the limit of stalls. On Windows each connection has a thread
// from the begin. Must not know: routes, models. Test: tests/server/test_limits.py.

#pragma once

#include "server/http_limits.h"

#include <cpp-httplib/httplib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

namespace draftwood {

class connections {
  public:
    using task = std::function<void()>; // serves a connection to its end and closes it

    // `limits.connections` is cut to half of the files that the process may open.
    explicit connections(const dw_http_limits & limits);
    ~connections();

    // Takes a new connection over from a listener. Thread-safe.
    void admit(socket_t socket, task serve);
    // True if connections should be closed behind a reply: one that waits for its next request holds a thread.
    bool crowded() const { return n_running_ > n_most_ / 2; }
    // Ends all connections and returns when every thread has ended. Listeners must have ended.
    void shutdown();

  private:
    using clock = std::chrono::steady_clock;
    struct waiter {
        socket_t          socket;
        task              serve;
        clock::time_point since   = clock::now();
        bool              partial = false; // a part of the head is there
    };

    // Those that wait, in a thread of its own.
    void watch();
    bool take_arrivals(std::list<waiter> & waiting);
    void pause(const std::list<waiter> & waiting) const;
    bool moves_on(waiter & one);
    void run(waiter & one, bool has_body);
    void wake() const;

    const int32_t         n_most_;
    const int32_t         n_kept_; // threads for requests without a body
    const clock::duration head_time_;

    std::mutex              mutex_; // of the next three, and of changes of n_running_
    std::list<waiter>       arrived_;
    std::list<socket_t>     served_;
    bool                    stopping_ = false;
    std::condition_variable ended_;
    std::atomic<int32_t>    n_running_{ 0 };
    int                     pipe_[2] = { -1, -1 }; // wakes the watcher
    std::thread             watcher_;
};

// What httplib::Server::new_task_queue returns: one for each listener, on connections that they share.
class connection_queue : public httplib::TaskQueue {
  public:
    explicit connection_queue(connections & all) :
        all_(all) {}
    bool enqueue(std::function<void()>) override { return false; } // httplib calls enqueue_from
    bool enqueue_from(socket_t socket, std::function<void()> serve) override {
        all_.admit(socket, std::move(serve));
        return true;
    }
    void shutdown() override {} // the owner of `all` does it

  private:
    connections & all_;
};

} // namespace draftwood
