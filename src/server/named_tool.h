// A `tool_choice` that names a tool: llama-server reads what is no string as "auto", and Anthropic's name as any tool.
// Here it becomes that tool alone, and "required". A reply may still hold text before the call. Both throw
// std::invalid_argument, which llama-server makes a 400. Must not know: templates, slots.
// Test: tests/server/test_tools.py.

#pragma once

#include <stdexcept>
#include <string>

namespace draftwood {

// the name in an object of a request: {"name": ...}; empty: it has none
template <typename Json> std::string name_in(const Json & object) {
    const bool has = object.is_object() && object.contains("name") && object.at("name").is_string();
    return has ? object.at("name").template get<std::string>() : "";
}

template <typename Json> bool is_tool(const Json & tool, const std::string & name) {
    return tool.is_object() && tool.contains("function") && name_in(tool.at("function")) == name;
}

// {"type": "function", "function": {"name": ...}} of a chat, {"type": "function", "name": ...} of Responses.
template <typename Json> void name_tool(Json & body) {
    if (!body.contains("tool_choice") || !body.at("tool_choice").is_object()) {
        return;
    }
    const Json        choice = body.at("tool_choice");
    const std::string name   = name_in(choice.contains("function") ? choice.at("function") : choice);
    if (name.empty()) {
        throw std::invalid_argument("found a tool_choice without a name; expected the function's");
    }
    const Json tools = body.contains("tools") ? body.at("tools") : Json::array();
    Json       named = Json::array();
    for (const Json & tool : tools) {
        if (is_tool(tool, name)) {
            named.push_back(tool);
        }
    }
    if (named.empty()) {
        throw std::invalid_argument("found a tool_choice of " + name + "; expected one of the request's tools");
    }
    body["tools"]       = named;
    body["tool_choice"] = "required";
}

// Anthropic's {"type": "tool", "name": ...} and {"type": "none"}, as a chat says them.
template <typename Json> void keep_tool_choice(const Json & choice, Json & chat) {
    const bool        has  = choice.contains("type") && choice.at("type").is_string();
    const std::string type = has ? choice.at("type").template get<std::string>() : "";
    if (type == "none") {
        chat["tool_choice"] = "none";
    } else if (type == "tool") {
        Json named          = Json::object();
        named["type"]       = "function";
        named["name"]       = name_in(choice);
        chat["tool_choice"] = named;
    }
}

} // namespace draftwood
