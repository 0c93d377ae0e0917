#include "spipe/plan/hardware.h"

#include <fmt/core.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/units.h"

namespace spipe::plan {

namespace {

struct RateKey {
  const char* section;
  const char* key;
  double Hardware::*field;
};
struct SizeKey {
  const char* section;
  const char* key;
  std::uint64_t Hardware::*field;
};
struct CountKey {
  const char* section;
  const char* key;
  int Hardware::*field;
};

constexpr RateKey kRates[] = {
    {"device", "matmul_flops", &Hardware::matmul_flops},
    {"device", "memory_bandwidth", &Hardware::memory_bytes_per_s},
    {"link", "h2d", &Hardware::h2d_bytes_per_s},
    {"link", "d2h", &Hardware::d2h_bytes_per_s},
    {"link", "latency", &Hardware::link_latency_s},
    {"link", "message_kernels", &Hardware::message_kernel_bytes_per_s},
    {"network", "bandwidth", &Hardware::network_bytes_per_s},
    {"network", "latency", &Hardware::network_latency_s},
    {"host", "update", &Hardware::update_params_per_s},
    {"host", "update_per_rank", &Hardware::update_params_per_s_rank},
    {"host", "dram_bandwidth", &Hardware::dram_bytes_per_s},
    {"host", "storage_bandwidth", &Hardware::storage_bytes_per_s},
};
constexpr SizeKey kSizes[] = {{"device", "memory", &Hardware::memory_bytes}, {"host", "memory", &Hardware::host_bytes}};
constexpr CountKey kCounts[] = {{"", "hosts", &Hardware::hosts},
                                {"", "ranks_per_host", &Hardware::ranks_per_host},
                                {"link", "ranks_per_link", &Hardware::ranks_per_link}};

class Parser {
 public:
  Parser(std::string_view text, const std::string& name) : name_(name) {
    try {
      root_ = YAML::Load(std::string(text));
    } catch (const YAML::Exception& e) {
      throw Error(e.msg, place(e.mark), "a hardware file is YAML: sections device, link, network, host with numbers");
    }
    if (!root_.IsMap()) throw Error("no settings found", name, "see configs/hardware for examples");
  }

  Hardware parse() {
    Hardware hardware;
    hardware.name = name_;
    for (const auto& entry : root_) {
      const std::string key = entry.first.as<std::string>();
      if (key == "name") {
        hardware.name = scalar(entry.second, key);
      } else if (key == "unit_times") {
        read_unit_times(entry.second, hardware);
      } else if (is_section(key)) {
        if (!entry.second.IsMap())
          throw Error(fmt::format("'{}' is a section", key), place(entry.second.Mark()), "indent its keys below it");
        for (const auto& inner : entry.second) read(hardware, key, inner.first.as<std::string>(), inner.second);
      } else {
        read(hardware, "", key, entry.second);
      }
    }
    return hardware;
  }

 private:
  [[nodiscard]] std::string place(const YAML::Mark& mark) const {
    return mark.is_null() ? name_ : fmt::format("{}:{}", name_, mark.line + 1);
  }
  static bool is_section(std::string_view key) { return key == "device" || key == "link" || key == "network" || key == "host"; }
  [[nodiscard]] std::string scalar(const YAML::Node& node, const std::string& key) const {
    if (!node.IsScalar()) throw Error(fmt::format("'{}' is one value", key), place(node.Mark()));
    return node.Scalar();
  }

  // "8.6e9", or with a unit of bytes, "8.6 GB".
  [[nodiscard]] double number(const YAML::Node& node, const std::string& key) const {
    const std::string text = scalar(node, key);
    char* end = nullptr;
    double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0') {
      try {
        value = static_cast<double>(parse_bytes(text));
      } catch (const Error& e) {
        throw Error(fmt::format("'{}' of {}: {}", text, key, e.finding()), place(node.Mark()),
                    "a number, or one with a unit of bytes");
      }
    }
    if (!std::isfinite(value) || value < 0)
      throw Error(fmt::format("'{}' of {} is no rate or size", text, key), place(node.Mark()), "0 or more");
    return value;
  }

  void read(Hardware& hardware, std::string_view section, const std::string& key, const YAML::Node& node) const {
    const auto is_it = [&](const auto& entry) { return section == entry.section && key == entry.key; };
    for (const RateKey& rate : kRates) {
      if (is_it(rate)) {
        hardware.*rate.field = number(node, key);
        return;
      }
    }
    for (const SizeKey& size : kSizes) {
      if (is_it(size)) {
        hardware.*size.field = static_cast<std::uint64_t>(number(node, key));
        return;
      }
    }
    for (const CountKey& count : kCounts) {
      if (is_it(count)) {
        const double value = number(node, key);
        if (value < 1 || value > 65536 || value != std::floor(value)) {
          throw Error(fmt::format("'{}' of {} is no count", node.Scalar(), key), place(node.Mark()), "a whole number from 1");
        }
        hardware.*count.field = static_cast<int>(value);
        return;
      }
    }
    refuse(section, key, node);
  }

  [[noreturn]] void refuse(std::string_view section, const std::string& key, const YAML::Node& node) const {
    std::vector<std::string> known;
    const auto add = [&](const auto& list) {
      for (const auto& entry : list) {
        if (section == entry.section) known.emplace_back(entry.key);
      }
    };
    add(kRates);
    add(kSizes);
    add(kCounts);
    if (section.empty()) known.insert(known.end(), {"name", "device", "link", "network", "host", "unit_times"});
    const std::string nearest = nearest_word(key, known);
    std::string all;
    for (const std::string& word : known) all += (all.empty() ? "" : ", ") + word;
    throw Error(fmt::format("unknown key '{}'", key), place(node.Mark()),
                nearest.empty() ? "known are " + all : fmt::format("did you mean '{}'?", nearest));
  }

  void read_unit_times(const YAML::Node& list, Hardware& hardware) const {
    if (!list.IsSequence()) throw Error("unit_times is a list of [forward, backward] seconds", place(list.Mark()));
    for (const YAML::Node& pair : list) {
      if (!pair.IsSequence() || pair.size() != 2) {
        throw Error("a unit time is [forward, backward] seconds", place(pair.Mark()));
      }
      hardware.unit_times.push_back({number(pair[0], "unit_times"), number(pair[1], "unit_times")});
    }
  }

  std::string name_;
  YAML::Node root_;
};

}  // namespace

Hardware parse_hardware(std::string_view text, const std::string& name_in_errors) {
  return Parser(text, name_in_errors).parse();
}

Hardware load_hardware(const std::filesystem::path& file) { return parse_hardware(read_text(file), file.string()); }

std::string hardware_text(const Hardware& hardware) {
  std::string text =
      fmt::format("name: {}\nhosts: {}\nranks_per_host: {}\n", hardware.name, hardware.hosts, hardware.ranks_per_host);
  for (const char* section : {"device", "link", "network", "host"}) {
    std::string inside;
    for (const RateKey& rate : kRates) {
      if (std::string_view(section) != rate.section || hardware.*rate.field == 0) continue;
      inside += fmt::format("  {}: {}\n", rate.key, hardware.*rate.field);
    }
    for (const SizeKey& size : kSizes) {
      if (std::string_view(section) != size.section || hardware.*size.field == 0) continue;
      inside += fmt::format("  {}: {}\n", size.key, hardware.*size.field);
    }
    if (std::string_view(section) == "link" && hardware.ranks_per_link > 1) {
      inside += fmt::format("  ranks_per_link: {}\n", hardware.ranks_per_link);
    }
    if (!inside.empty()) text += fmt::format("{}:\n{}", section, inside);
  }
  if (!hardware.unit_times.empty()) text += "unit_times:\n";
  for (const UnitTime& time : hardware.unit_times) text += fmt::format("  - [{}, {}]\n", time.forward_s, time.backward_s);
  return text;
}

}  // namespace spipe::plan
