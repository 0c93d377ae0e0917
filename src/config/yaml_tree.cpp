#include "yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "spipe/base/error.h"

namespace spipe::config {
namespace {

constexpr const char* kAliasHint = "quote text that begins with '*'";

// Builds the tree from parser events (yaml-cpp's own node type merges duplicate keys without a word).
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const std::string& name) : name_(name) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    refuse_extras(mark, "?", anchor);
    add({.kind = Node::Kind::null, .line = line_of(mark), .text = "null"});
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Error("an alias ('*name') is not supported here", place(mark), kAliasHint);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, const std::string& value) override {
    refuse_extras(mark, tag, anchor);
    add({.kind = Node::Kind::scalar, .line = line_of(mark), .text = value, .quoted = tag == "!"});
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    refuse_extras(mark, tag, anchor);
    open({.kind = Node::Kind::list, .line = line_of(mark)});
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    refuse_extras(mark, tag, anchor);
    open({.kind = Node::Kind::map, .line = line_of(mark)});
  }
  void OnMapEnd() override { close(); }

  [[nodiscard]] Node take_root() { return std::move(root_); }

 private:
  struct Level {
    Node node;
    bool has_key = false;
    std::string key;
    int key_line = 0;
  };

  static int line_of(const YAML::Mark& mark) { return mark.line + 1; }
  [[nodiscard]] std::string place(const YAML::Mark& mark) const { return place_of(name_, line_of(mark)); }

  // "?" and "!" are what the parser itself gives plain and quoted scalars.
  void refuse_extras(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) const {
    if (anchor != 0) throw Error("an anchor ('&name') is not supported", place(mark), "write the value out where it is used");
    if (!tag.empty() && tag != "?" && tag != "!") throw Error("the tag '" + tag + "' is not supported", place(mark));
  }

  void open(Node node) { levels_.push_back({.node = std::move(node), .has_key = false, .key = {}, .key_line = 0}); }
  void close() {
    Node node = std::move(levels_.back().node);
    levels_.pop_back();
    add(std::move(node));
  }

  void add(Node node) {
    if (levels_.empty()) {
      root_ = std::move(node);
      return;
    }
    Level& level = levels_.back();
    if (level.node.kind == Node::Kind::list) {
      level.node.items.push_back(std::move(node));
    } else if (level.has_key) {
      level.node.entries.push_back({.key = std::move(level.key), .line = level.key_line, .value = std::move(node)});
      level.has_key = false;
    } else {
      set_key(level, node);
    }
  }

  void set_key(Level& level, const Node& node) {
    if (node.kind != Node::Kind::scalar) throw Error("a key must be a word, not " + describe(node), place_of(name_, node.line));
    const auto same = std::ranges::find(level.node.entries, node.text, &Entry::key);
    if (same != level.node.entries.end()) {
      throw Error("key '" + node.text + "' is given twice, first on line " + std::to_string(same->line),
                  place_of(name_, node.line), "remove one of them");
    }
    level.has_key = true;
    level.key = node.text;
    level.key_line = node.line;
  }

  const std::string& name_;
  std::vector<Level> levels_;
  Node root_;
};

void refuse_tabs(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const std::size_t end = line.find_first_not_of(" \t\r");
    const std::size_t tab = line.find('\t');
    if (end != std::string::npos && tab < end)
      throw Error("a tab in the indentation", place_of(name, number), "indent with spaces");
  }
}

}  // namespace

std::string describe(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return "nothing (null)";
    case Node::Kind::list:
      return "a list";
    case Node::Kind::map:
      return "a map";
    case Node::Kind::scalar:
      break;
  }
  return "'" + node.text + "'";
}

std::string place_of(const std::string& name, int line) {
  return line > 0 && !name.starts_with("--") ? name + ":" + std::to_string(line) : name;
}

Node parse_yaml(const std::string& text, const std::string& name) {
  refuse_tabs(text, name);
  TreeBuilder builder(name);
  std::istringstream stream(text);
  try {
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) throw Error("the file is empty", name);
    Node root = builder.take_root();
    if (parser.HandleNextDocument(builder)) throw Error("a second document ('---') is not supported", name);
    return root;
  } catch (const YAML::Exception& error) {
    const bool alias = error.msg.find("anchor") != std::string::npos;  // an alias without its anchor: "*.bin" unquoted
    throw Error("not valid YAML: " + error.msg, place_of(name, error.mark.is_null() ? 0 : error.mark.line + 1),
                alias ? kAliasHint : "");
  }
}

}  // namespace spipe::config
