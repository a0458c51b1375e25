// A `tool_choice` that is an object: llama-server reads it as "auto", and a name of Anthropic's as any tool. Here a
// name becomes that tool alone and "required", and a list of allowed tools these alone. A reply may still hold text
// before the call. A name of no tool throws std::invalid_argument, which llama-server makes a 400.
// Must not know: templates, slots. Test: tests/server/test_tools.py.

#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace draftwood {

// a text of an object of a request; empty: it has none of this name
template <typename Json> std::string text_in(const Json & object, const char * name) {
    const bool has = object.is_object() && object.contains(name) && object.at(name).is_string();
    return has ? object.at(name).template get<std::string>() : "";
}

// of {"function": {"name": ...}}, as chats have it, or {"name": ...}, as Responses do
template <typename Json> std::string name_of_tool(const Json & tool) {
    const bool nested = tool.is_object() && tool.contains("function");
    return text_in(nested ? tool.at("function") : tool, "name");
}

template <typename Json> void keep_tools(Json & body, const std::vector<std::string> & names) {
    const Json tools = body.contains("tools") ? body.at("tools") : Json::array();
    Json       kept  = Json::array();
    for (const Json & tool : tools) {
        const std::string name = name_of_tool(tool);
        if (!name.empty() && std::find(names.begin(), names.end(), name) != names.end()) {
            kept.push_back(tool);
        }
    }
    if (kept.empty()) {
        const std::string found = names.empty() || names[0].empty() ? "nothing" : names[0];
        throw std::invalid_argument("found a tool_choice of " + found + "; expected one of the request's tools");
    }
    body["tools"] = kept;
}

// OpenAI's {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}; in Responses its fields are the
// choice's own.
template <typename Json> void keep_allowed_tools(Json & body, const Json & choice) {
    const Json               allowed = choice.contains("allowed_tools") ? choice.at("allowed_tools") : choice;
    std::vector<std::string> names;
    const Json tools = allowed.is_object() && allowed.contains("tools") ? allowed.at("tools") : Json::array();
    for (const Json & tool : tools) {
        names.push_back(name_of_tool(tool));
    }
    keep_tools(body, names);
    body["tool_choice"] = text_in(allowed, "mode") == "required" ? "required" : "auto";
}

template <typename Json> void name_tool(Json & body) {
    if (!body.contains("tool_choice") || !body.at("tool_choice").is_object()) {
        return;
    }
    const Json        choice = body.at("tool_choice");
    const std::string type   = text_in(choice, "type");
    if (type == "function") {
        keep_tools(body, { name_of_tool(choice) });
        body["tool_choice"] = "required";
    } else if (type == "allowed_tools") {
        keep_allowed_tools(body, choice);
    } else if (type == "auto" || type == "none" || type == "required") {
        body["tool_choice"] = type;
    }
}

// Anthropic's {"type": "tool", "name": ...} and {"type": "none"}, as a chat says them.
template <typename Json> void keep_tool_choice(const Json & choice, Json & chat) {
    const std::string type = text_in(choice, "type");
    if (type == "none") {
        chat["tool_choice"] = "none";
    } else if (type == "tool") {
        Json named          = Json::object();
        named["type"]       = "function";
        named["name"]       = text_in(choice, "name");
        chat["tool_choice"] = named;
    }
}

} // namespace draftwood
