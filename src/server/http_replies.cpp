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

void limit(httplib::Server & server, const common_params & params, std::unique_ptr<connections> & all) {
    const dw_http_limits & limits = params.dw_http;
    if (!all) {
        all.reset(new connections(limits));
    }
    server.set_read_timeout(std::min(limits.stall_time, params.timeout_read));
    server.set_write_timeout(std::min(limits.stall_time, params.timeout_write));
    server.set_payload_max_length((size_t) limits.body << 20);
    server.set_post_routing_handler([&all](const httplib::Request &, httplib::Response & response) {
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
        message = "the body of the request is too large; --http-body is the limit";
    } else if (response.status == httplib::StatusCode::BadRequest_400 &&
               request.body.size() < request.get_header_value_u64("Content-Length")) {
        const bool stalled = request.is_connection_closed && !request.is_connection_closed();
        response.status    = stalled ? 408 : 400;
        message            = "the body of the request is incomplete";
        message += stalled ? "; --http-stall-time is the limit" : "";
    }
    response.set_content(error_json(response.status, message), "application/json; charset=utf-8");
}

} // namespace draftwood
