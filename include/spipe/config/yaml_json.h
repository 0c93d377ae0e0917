// YAML files with JSON content, such as configs/models/*.yaml with the keys of a Hugging Face config.json.
#pragma once

#include <filesystem>
#include <string>

namespace spipe::config {

// The file as JSON text, keys in the file's order: plain null (~), true/false, integers and decimal numbers keep their types,
// quoted text stays text. Refused with file and line: what YAML readers disagree about (yes/no/on/off, 010, 1_000, 12:30,
// .inf, .nan), duplicate keys, anchors and aliases, tabs, empty files, anything but a map at the top.
[[nodiscard]] std::string yaml_to_json_text(const std::filesystem::path& path);

}  // namespace spipe::config
