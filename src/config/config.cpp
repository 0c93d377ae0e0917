#include "spipe/config/config.h"

#include <map>
#include <optional>

#include "schema.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "yaml_tree.h"

namespace spipe::config {
namespace {

class Loader {
 public:
  explicit Loader(std::string file_name) : file_name_(std::move(file_name)) {
    for (const Key& key : keys()) config_.origins[key.info.path] = Origin::defaulted;
  }

  void apply_file(const std::string& text) {
    const Node root = parse_yaml(text, file_name_);
    if (root.kind == Node::Kind::null) throw Error("the file is empty", file_name_);
    apply_section(root, "", root.line, file_name_, Origin::file);
  }

  // "a.b=c"; the text after '=' is a scalar as it stands, or YAML when it begins like a list, a map or a quotation.
  void apply_override(const std::string& text) {
    const std::size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos) {
      throw Error("'" + text + "' is not KEY=VALUE", "--set", "write it as in --set optimizer.lr=1e-4");
    }
    apply(text.substr(0, equals), override_value(text.substr(equals + 1)), 0, "--set", Origin::command_line);
  }

  Config finish() {
    // Who names a folder with parameters means to start from them.
    if (!config_.model.hf.empty() && !places_.contains("model.init")) config_.model.init = Init::pretrained;
    // Every replica takes whole groups.
    if (!places_.contains("batch.sum_groups")) config_.batch.sum_groups = config_.parallel.data;
    use_defaults_of_rule();
    check_rules(config_, [this](std::string_view key) {
      const auto found = places_.find(key);
      return found == places_.end() ? file_name_ : found->second;
    });
    return std::move(config_);
  }

 private:
  // What is usual differs from rule to rule.
  void use_defaults_of_rule() {
    OptimizerConfig& optimizer = config_.optimizer;
    const bool l2 = optimizer.type == "adam" || optimizer.type == "sgd";
    if (l2 && !places_.contains("optimizer.weight_decay")) optimizer.weight_decay = 0;
    if (optimizer.type == "lion" && !places_.contains("optimizer.betas")) optimizer.beta2 = 0.99;
  }

  static Node override_value(const std::string& text) {
    if (!text.empty() && std::string_view("[{\"'").find(text[0]) != std::string_view::npos) return parse_yaml(text, "--set");
    Node node;
    node.kind = text == "null" || text == "~" ? Node::Kind::null : Node::Kind::scalar;
    node.text = text;
    return node;
  }

  void apply(const std::string& path, const Node& value, int line, const std::string& source, Origin origin) {
    if (const Key* key = find_key(path)) {
      key->read(config_, {value, path, place_of(source, line)});
      places_[path] = place_of(source, line);
      config_.origins[path] = origin;
    } else if (is_section(path)) {
      apply_section(value, path, line, source, origin);
    } else {
      throw Error("unknown key '" + path + "'", place_of(source, line), suggestion_for(path));
    }
  }

  void apply_section(const Node& node, const std::string& path, int line, const std::string& source, Origin origin) {
    if (node.kind != Node::Kind::map) refuse_section(node, path, place_of(source, line));
    for (const Entry& entry : node.entries) {
      const std::string child = path.empty() ? entry.key : path + "." + entry.key;
      if (entry.key.find('.') != std::string::npos) {
        throw Error("unknown key '" + child + "'", place_of(source, entry.line), "write sections as nested maps, without dots");
      }
      apply(child, entry.value, entry.line, source, origin);
    }
  }

  [[noreturn]] static void refuse_section(const Node& node, const std::string& path, std::string place) {
    std::string names;
    for (const std::string& name : names_in(path)) names += (names.empty() ? "" : ", ") + name;
    throw Error(
        (path.empty() ? std::string("the top level") : "'" + path + "'") + " must be a map of keys, not " + describe(node),
        std::move(place), "its keys are " + names);
  }

  std::string file_name_;
  Config config_;
  std::map<std::string, std::string, std::less<>> places_;  // where each given key stands
};

}  // namespace

Config parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  Loader loader(name);
  loader.apply_file(text);
  for (const std::string& text_of_one : overrides) loader.apply_override(text_of_one);
  return loader.finish();
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
  Config config = parse_config(read_text(file), file.string(), overrides);
  config.file = file;
  return config;
}

}  // namespace spipe::config
