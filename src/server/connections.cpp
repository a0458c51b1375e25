// See connections.h.

#include "server/connections.h"

#include "server/http_replies.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <string>
#include <system_error>
#include <vector>

#ifndef _WIN32
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#endif

namespace draftwood {

namespace {

constexpr char too_many[]  = "too many connections; try again later, or raise --http-connections";
constexpr char too_large[] = "the head of the request is larger than 16 KiB";
constexpr char too_slow[]  = "the head of the request did not arrive in time; --http-head-time is the limit";

#ifdef _WIN32

void end_socket(socket_t socket) {
    ::shutdown(socket, SD_BOTH);
}

void refuse(socket_t socket, int, const char *) {
    closesocket(socket);
}

int32_t most_files(int32_t wanted) {
    return wanted;
}

#else

void end_socket(socket_t socket) {
    ::shutdown(socket, SHUT_RDWR);
}

// Files beside connections are few: the model, the page, the log.
int32_t most_files(int32_t wanted) {
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) {
        return wanted;
    }
    return (int32_t) std::min<rlim_t>(wanted, files.rlim_cur / 2);
}

enum class head { none, partial, bodiless, whole, gone, large };

// A TLS handshake is whole: what it hides cannot be looked at.
head look(socket_t socket) {
    char          bytes[16384];
    const ssize_t n = recv(socket, bytes, sizeof(bytes), MSG_PEEK | MSG_DONTWAIT);
    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? head::none : head::gone;
    }
    std::string text(bytes, (size_t) n);
    const auto  end = text.find("\r\n\r\n");
    if (end == std::string::npos) {
        const bool tls = text[0] == '\x16';
        return tls ? head::whole : n == sizeof(bytes) ? head::large : head::partial;
    }
    text.resize(end);
    const bool may_have_none =
        text.rfind("GET ", 0) == 0 || text.rfind("HEAD ", 0) == 0 || text.rfind("OPTIONS ", 0) == 0;
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return (char) std::tolower(c); });
    const bool has_none =
        text.find("\ncontent-length:") == std::string::npos && text.find("\ntransfer-encoding:") == std::string::npos;
    return may_have_none && has_none ? head::bodiless : head::whole;
}

// Never waits: whoever does not read the reply loses it.
void refuse(socket_t socket, int status, const char * message) {
    const std::string body  = error_json(status, message);
    const std::string reply = "HTTP/1.1 " + std::to_string(status) + " " + httplib::status_message(status) +
                              "\r\nContent-Type: application/json; charset=utf-8\r\nConnection: close\r\n"
                              "Content-Length: " +
                              std::to_string(body.size()) + "\r\n\r\n" + body;
    send(socket, reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    ::shutdown(socket, SHUT_WR);
    char rest[16384]; // what is unread at a close makes it a reset, and the reply is lost
    for (int i = 0; i < 64 && recv(socket, rest, sizeof(rest), MSG_DONTWAIT) > 0; ++i) {
    }
    close(socket);
}

#endif

} // namespace

connections::connections(const dw_http_limits & limits) :
    n_most_(std::max(8, most_files(limits.connections))),
    n_kept_(std::max(2, n_most_ / 8)),
    head_time_(std::chrono::seconds(limits.head_time)) {
#ifndef _WIN32
    if (pipe(pipe_) != 0) {
        throw std::system_error(errno, std::generic_category(), "no pipe for the server's connections");
    }
    for (const int end : pipe_) {
        fcntl(end, F_SETFL, O_NONBLOCK);
        fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    watcher_ = std::thread([this] { watch(); });
#endif
}

connections::~connections() {
    shutdown();
#ifndef _WIN32
    for (const int end : pipe_) {
        close(end);
    }
#endif
}

void connections::shutdown() {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    if (watcher_.joinable()) {
        lock.unlock();
        wake();
        watcher_.join();
        lock.lock();
    }
    // A thread may wait for a client, or for tokens that nobody makes any more: both ask whether the client has left.
    for (const socket_t socket : served_) {
        end_socket(socket);
    }
    ended_.wait(lock, [this] { return n_running_ == 0; });
}

void connections::run(waiter & one, bool has_body) {
    std::list<socket_t>::iterator place;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_ || n_running_ >= n_most_ - (has_body ? n_kept_ : 0)) {
            return refuse(one.socket, 429, too_many);
        }
        place = served_.insert(served_.end(), one.socket);
        ++n_running_;
    }
    const auto end = [this, place] {
        const std::lock_guard<std::mutex> lock(mutex_);
        served_.erase(place);
        --n_running_;
        ended_.notify_all();
    };
    try {
        std::thread([serve = std::move(one.serve), end] {
            serve();
            end();
        }).detach();
    } catch (const std::system_error &) {
        refuse(one.socket, 429, too_many);
        end();
    }
}

#ifdef _WIN32

void connections::admit(socket_t socket, task serve) {
    waiter one{ socket, std::move(serve) };
    run(one, true);
}

void connections::wake() const {}

#else

void connections::admit(socket_t socket, task serve) {
    waiter one{ socket, std::move(serve) };
    if (moves_on(one)) {
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        arrived_.push_back(std::move(one));
    }
    wake();
}

void connections::wake() const {
    const char any = 0;
    if (write(pipe_[1], &any, 1) < 0) {
        // the pipe is full: the watcher is awake
    }
}

void connections::watch() {
    std::list<waiter> waiting; // oldest first
    while (take_arrivals(waiting)) {
        waiting.remove_if([this](waiter & one) { return moves_on(one); });
        while (!waiting.empty() && (int32_t) waiting.size() + n_running_ > n_most_) {
            refuse(waiting.front().socket, 429, too_many);
            waiting.pop_front();
        }
        pause(waiting);
    }
    for (const waiter & one : waiting) {
        close(one.socket);
    }
}

// Returns false when the server stops.
bool connections::take_arrivals(std::list<waiter> & waiting) {
    char any[256];
    while (read(pipe_[0], any, sizeof(any)) > 0) {
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting.splice(waiting.end(), arrived_);
    return !stopping_;
}

// Until something happens to one that waits. poll() tells of a partial head over and over, so those are looked at by
// the clock.
void connections::pause(const std::list<waiter> & waiting) const {
    std::vector<pollfd> files{ { pipe_[0], POLLIN, 0 } };
    int                 most = -1;
    if (!waiting.empty()) {
        const auto left = waiting.front().since + head_time_ - clock::now();
        most = 1 + (int) std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
    }
    for (const waiter & one : waiting) {
        if (one.partial) {
            most = std::min(most, 20);
        } else {
            files.push_back({ one.socket, POLLIN, 0 });
        }
    }
    poll(files.data(), (nfds_t) files.size(), most);
}

// Gives a connection its thread, or refuses it. Returns false if it waits on.
bool connections::moves_on(waiter & one) {
    switch (look(one.socket)) {
        case head::bodiless:
            run(one, false);
            return true;
        case head::whole:
            run(one, true);
            return true;
        case head::large:
            refuse(one.socket, 431, too_large);
            return true;
        case head::gone:
            close(one.socket);
            return true;
        case head::partial:
            one.partial = true;
            break;
        case head::none:
            break;
    }
    if (clock::now() - one.since < head_time_) {
        return false;
    }
    if (one.partial) {
        refuse(one.socket, 408, too_slow);
    } else {
        close(one.socket); // a browser opens connections in advance
    }
    return true;
}

#endif

} // namespace draftwood
