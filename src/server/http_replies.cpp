// See http_replies.h.

#include "server/http_replies.h"

#include "common.h"

#include <algorithm>

namespace draftwood {

std::string error_json(int status, const std::string & message) {
    const char * type = status == 429 ? "rate_limit_error" : "invalid_request_error";
    return "{\"error\":{\"code\":" + std::to_string(status) + ",\"message\":\"" + message + "\",\"type\":\"" + type +
           "\"}}";
}

namespace {

const char * const json_type = "application/json; charset=utf-8";

// The client ended its part of the connection, and llama-server let go of the request: an empty 200.
bool is_given_up(const httplib::Request & request, const httplib::Response & response) {
    const bool empty = response.body.empty() && response.content_length_ == 0 && !response.content_provider_;
    return empty && response.status == 200 && request.is_connection_closed && request.is_connection_closed();
}

const char * why_too_large(const httplib::Request & request) {
    const bool form = request.get_header_value("Content-Type").rfind("application/x-www-form-urlencoded", 0) == 0;
    return form ? "the body of a form is larger than 1 MiB; expected Content-Type: application/json"
                : "the body of the request is too large; --http-body is the limit";
}

} // namespace

void limit(httplib::Server & server, const common_params & params, std::unique_ptr<connections> & all) {
    const dw_http_limits & limits = params.dw_http;
    if (!all) {
        all.reset(new connections(limits));
    }
    server.set_read_timeout(std::min(limits.stall_time, params.timeout_read));
    server.set_write_timeout(std::min(limits.stall_time, params.timeout_write));
    server.set_payload_max_length((size_t) limits.body << 20);
    server.set_post_routing_handler([&all](const httplib::Request & request, httplib::Response & response) {
        if (is_given_up(request, response)) {
            const std::string said = "the client ended its part of the connection before the reply was ready";
            response.status        = httplib::StatusCode::BadRequest_400;
            response.headers.erase("Content-Length");
            response.set_content(error_json(response.status, said), json_type);
            response.set_header("Content-Length", std::to_string(response.body.size()));
        }
        if (all && all->crowded()) {
            response.set_header("Connection", "close");
        }
    });
}

void explain(const httplib::Request & request, httplib::Response & response) {
    if (!response.body.empty()) {
        return;
    }
    std::string message = httplib::status_message(response.status);
    if (response.status == httplib::StatusCode::PayloadTooLarge_413) {
        message = why_too_large(request);
    } else if (response.status == httplib::StatusCode::BadRequest_400 &&
               request.body.size() < request.get_header_value_u64("Content-Length")) {
        const bool stalled = request.is_connection_closed && !request.is_connection_closed();
        response.status    = stalled ? 408 : 400;
        message            = "the body of the request is incomplete";
        message += stalled ? "; --http-stall-time is the limit" : "";
    }
    response.set_content(error_json(response.status, message), json_type);
}

} // namespace draftwood
