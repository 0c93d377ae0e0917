#include "html_check.h"

#include <algorithm>
#include <cctype>
#include <regex>
#include <set>

namespace spipe::report {
namespace {

const std::set<std::string> kVoid = {"meta", "input", "br", "hr", "link", "img", "base"};
// Shapes without content; the only ones that may close themselves, as SVG allows.
const std::set<std::string> kShapes = {"rect", "line", "circle", "polyline", "path"};
const std::set<std::string> kLoading = {"script", "img",   "link", "iframe", "object", "embed",
                                        "base",   "image", "use",  "audio",  "video"};
const std::set<std::string> kBlocks = {"p", "div", "h1", "h2", "h3", "table", "pre"};

class Checker {
 public:
  explicit Checker(const std::string& page) : page_(page) {}

  std::vector<std::string> check() {
    if (!page_.starts_with("<!doctype html>\n")) problem("no doctype");
    std::size_t at = page_.find('>') + 1;
    while (at < page_.size()) {
      if (page_[at] != '<') {
        at = text(at);
      } else {
        const std::size_t end = page_.find('>', at);
        if (end == std::string::npos) {
          problem("a tag without its end");
          break;
        }
        tag(page_.substr(at + 1, end - at - 1));
        at = end + 1;
      }
    }
    for (const std::string& open : open_) problem("not closed: " + open);
    for (const char* once : {"html", "head", "title", "body", "h1"}) {
      if (std::count(seen_.begin(), seen_.end(), once) != 1) problem(std::string("not exactly once: ") + once);
    }
    return problems_;
  }

 private:
  void problem(const std::string& text) { problems_.push_back(text); }
  [[nodiscard]] bool inside(const std::string& name) const {
    return std::find(open_.begin(), open_.end(), name) != open_.end();
  }

  std::size_t text(std::size_t at) {
    const std::size_t end = std::min(page_.find('<', at), page_.size());
    const std::string run = page_.substr(at, end - at);
    if (inside("style")) {
      if (run.find("url(") != run.find("url(#") || run.find("@import") != std::string::npos) problem("a style that loads");
      return end;
    }
    references(run);
    const bool only_space = run.find_first_not_of(" \n\t") == std::string::npos;
    const std::string parent = open_.empty() ? "" : open_.back();
    if (!only_space && (parent == "tr" || parent == "table" || parent == "html" || parent.empty()))
      problem("text in " + parent + ": " + run);
    return end;
  }

  void references(const std::string& run) {
    static const std::regex reference("&(amp|lt|gt|quot|#[0-9]+);");
    for (std::size_t i = run.find('&'); i != std::string::npos; i = run.find('&', i + 1)) {
      std::smatch match;
      const std::string rest = run.substr(i, 12);
      if (!std::regex_search(rest, match, reference, std::regex_constants::match_continuous)) problem("a bare &: " + rest);
    }
  }

  void tag(const std::string& inner) {
    if (inner.starts_with("/")) {
      const std::string name = inner.substr(1);
      if (open_.empty() || open_.back() != name) {
        problem("closed " + name + (open_.empty() ? " with nothing open" : " inside of " + open_.back()));
        return;
      }
      open_.pop_back();
      return;
    }
    const bool closes_itself = inner.ends_with("/");
    std::size_t at = 0;
    while (at < inner.size() && std::isalnum(static_cast<unsigned char>(inner[at])) != 0) ++at;
    const std::string name = inner.substr(0, at);
    if (name.empty()) problem("a bare <: " + inner.substr(0, 20));
    seen_.push_back(inside("svg") ? "svg " + name : name);  // shapes have titles of their own
    attributes(name, closes_itself ? inner.substr(at, inner.size() - at - 1) : inner.substr(at));
    place(name);
    if (kLoading.contains(name)) problem("loads or runs something: " + name);
    if (closes_itself && !kShapes.contains(name)) problem("closes itself: " + name);
    if (!closes_itself && !kVoid.contains(name)) open_.push_back(name);
  }

  void place(const std::string& name) {
    const std::string parent = open_.empty() ? "" : open_.back();
    if ((name == "td" || name == "th") && parent != "tr") problem("a cell outside of a row");
    if (name == "tr" && parent != "table") problem("a row outside of a table");
    if (kBlocks.contains(name) && (inside("p") || inside("h1") || inside("h2") || inside("h3") || inside("pre"))) {
      problem(name + " inside of " + parent);
    }
    const bool drawing = kShapes.contains(name) || name == "g" || name == "text" || name == "tspan";
    if (drawing != inside("svg") && name != "svg" && (drawing || kBlocks.contains(name))) problem(name + " in the wrong world");
  }

  void attributes(const std::string& name, const std::string& given) {
    static const std::regex attribute(R"rx(\s+([a-zA-Z0-9-]+)(?:="([^"]*)")?)rx");
    std::set<std::string> names;
    auto begin = given.cbegin();
    std::smatch match;
    while (begin != given.cend() &&
           std::regex_search(begin, given.cend(), match, attribute, std::regex_constants::match_continuous)) {
      const std::string key = match[1], value = match[2];
      if (!names.insert(key).second) problem(name + " has " + key + " twice");
      if (key == "id" && !ids_.insert(value).second) problem("id twice: " + value);
      if (key == "href" || key == "src" || key == "action" || key.starts_with("on")) problem(name + " has " + key);
      if (value.find("//") != std::string::npos) problem("an address: " + value);
      references(value);
      begin = match[0].second;
    }
    if (std::string(begin, given.cend()).find_first_not_of(" \n") != std::string::npos) {
      problem(name + ": attributes cannot be read: " + std::string(begin, given.cend()));
    }
  }

  const std::string& page_;
  std::vector<std::string> open_, problems_, seen_;
  std::set<std::string> ids_;
};

}  // namespace

std::vector<std::string> html_problems(const std::string& page) { return Checker(page).check(); }

}  // namespace spipe::report
