// What the bundled llama-server would make of a chat request and of a reply: reads one JSON object per line
// {"template", "body", "reply"}, writes {"prompt", "message"} per line. Calls the functions that the server
// calls (common/chat.h), in its order; links the wheel's own library.

#include "chat.h"

#include <nlohmann/json.hpp>

#include <iostream>
#include <string>

using json = nlohmann::ordered_json;

static common_chat_templates_inputs inputs_of(const json & body) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(common_json::parse(body.at("messages").dump()));
    if (body.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(common_json::parse(body.at("tools").dump()));
    }
    inputs.parallel_tool_calls = body.value("parallel_tool_calls", true);
    inputs.reasoning_format    = COMMON_REASONING_FORMAT_DEEPSEEK;
    const json kwargs = body.value("chat_template_kwargs", json::object());
    for (const auto & item : kwargs.items()) {
        inputs.chat_template_kwargs[item.key()] = item.value().dump();
        if (item.key() == "enable_thinking") {
            inputs.enable_thinking = item.value().get<bool>();
        }
    }
    return inputs;
}

int main() {
    std::string line;
    while (std::getline(std::cin, line)) {
        json out;
        try {
            const json ask   = json::parse(line);
            const auto tmpls = common_chat_templates_init(nullptr, ask.at("template").get<std::string>(), "", "<|im_end|>");
            const auto params = common_chat_templates_apply(tmpls.get(), inputs_of(ask.at("body")));
            out["prompt"]     = params.prompt;
            out["generation_prompt"] = params.generation_prompt;
            common_chat_parser_params parser(params);
            parser.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
            parser.parse_tool_calls = ask.at("body").contains("tools");
            if (!params.parser.empty()) {
                parser.parser.load(params.parser);
            }
            const auto msg = common_chat_parse(ask.at("reply").get<std::string>(), false, parser);
            json calls = json::array();
            for (const auto & call : msg.tool_calls) {
                calls.push_back({ { "name", call.name }, { "arguments", call.arguments } });
            }
            out["message"] = { { "content", msg.content }, { "reasoning_content", msg.reasoning_content }, { "tool_calls", calls } };
        } catch (const std::exception & error) {
            out["error"] = error.what();
        }
        std::cout << out.dump() << std::endl;
    }
}
