// What llama-server's listeners say by themselves, under the limits of http_limits.h.
// Must not know: routes, models. Test: tests/server/test_limits.py.

#pragma once

#include "server/connections.h"

#include <memory>
#include <string>

struct common_params;

namespace draftwood {

// An error as OpenAI's clients know it.
std::string error_json(int status, const std::string & message);

// Sets a listener's limits of time and bytes. Makes what all listeners share with the first. An empty reply for a
// client that ended its part of the connection becomes a 400.
void limit(httplib::Server & server, const common_params & params, std::unique_ptr<connections> & all);

// Says in JSON why httplib refused a request by itself.
void explain(const httplib::Request & request, httplib::Response & response);

} // namespace draftwood
