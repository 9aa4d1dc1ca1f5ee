// Halfstep's side of chat_template_oracle.py. Reads lines of JSON,
//   {"template", "tokens", "messages", "add_generation_prompt"} or
//   {"folder", "messages", "add_generation_prompt"},
// and answers each with {"text"} or {"error"}.
#include <halfstep/chat_template.h>
#include <halfstep/error.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

using nlohmann::json;

std::string rendered(const json& request) {
  std::vector<halfstep::ChatMessage> messages;
  for (const json& message : request.at("messages"))
    messages.push_back({message.at("role"), message.at("content")});
  const bool prompt = request.at("add_generation_prompt");
  if (!request.contains("folder"))
    return halfstep::ChatTemplate(request.at("template").get<std::string>(), request.at("tokens"))
        .render(messages, prompt);
  const auto chat = halfstep::ChatTemplate::from_folder(request.at("folder").get<std::string>());
  HALFSTEP_CHECK(chat, "the folder has no chat template");
  return chat->render(messages, prompt);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    json answer;
    try {
      answer["text"] = rendered(json::parse(line));
    } catch (const halfstep::Bug&) {
      throw;
    } catch (const halfstep::Error& error) {
      answer["error"] = error.what();
    }
    std::cout << answer.dump() << std::endl;
  }
}
