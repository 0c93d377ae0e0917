// Reading traces. Files may have hundreds of megabytes: every event is checked and dropped as soon as it is parsed.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/trace.h"

namespace spipe::report {
namespace {

using nlohmann::json;

class Reader {
 public:
  explicit Reader(const std::filesystem::path& file) : file_(file.string()) {}

  Trace read() {
    const std::string text = read_text(file_);
    if (text.find_first_not_of(" \t\r\n") == std::string::npos)
      throw Error("the file is empty", file_, "write the trace again");
    json rest;
    try {
      rest = json::parse(text, [this](int depth, json::parse_event_t event, json& value) { return keep(depth, event, value); });
    } catch (const json::parse_error& error) {
      if (error.byte > text.find_last_not_of(" \t\r\n") + 1) {
        throw Error("the trace is cut short: its JSON ends in the middle", file_, "write the trace again");
      }
      throw Error(fmt::format("not a trace: no JSON at byte {}", error.byte), file_, kExpected);
    }
    const bool events = rest.is_object() && rest.contains("traceEvents") && rest["traceEvents"].is_array();
    if (!events || !is_ours(rest)) throw Error("not a trace of spipe", file_, kExpected);
    trace_.left_out = whole(rest["otherData"], "left_out", 0, std::numeric_limits<std::int64_t>::max());
    return std::move(trace_);
  }

 private:
  static constexpr const char* kExpected = "give a trace.json of spipe-train, or of spipe plan --trace";

  // A trace is {..., "traceEvents": [{event}, ...]}. Returns whether the value stays in the document.
  bool keep(int depth, json::parse_event_t event, json& value) {
    if (depth == 1 && event == json::parse_event_t::key) in_events_ = value == "traceEvents";
    if (!in_events_ || depth != 2 || event != json::parse_event_t::object_end) return true;
    ++number_;
    if (value.contains("ph") && value["ph"] == "X") add(value);
    return false;
  }

  static bool is_ours(const json& rest) {
    const auto other = rest.find("otherData");
    return other != rest.end() && other->is_object() && other->value("program", json()) == "spipe" &&
           other->value("version", json()) == 1;
  }

  void add(const json& event) {
    const json* arguments = member(event, "args");
    if (arguments == nullptr || !arguments->is_object()) fail("has no args");
    plan::TimelineSlice slice;
    slice.kind = kind_of(event);
    constexpr std::int64_t kWord = std::numeric_limits<std::uint16_t>::max(), kInt = std::numeric_limits<std::int32_t>::max();
    slice.rank = static_cast<std::uint16_t>(whole(event, "pid", 0, kWord));
    slice.stream = static_cast<plan::StreamKind>(whole(event, "tid", 0, kInt) % plan::kStreamCount);
    slice.task = static_cast<std::uint32_t>(whole(*arguments, "task", 0, std::numeric_limits<std::uint32_t>::max()));
    slice.bytes = static_cast<std::uint64_t>(whole(*arguments, "bytes", 0, std::numeric_limits<std::int64_t>::max()));
    slice.stage = static_cast<std::uint16_t>(whole(*arguments, "stage", 0, kWord));
    slice.flags = static_cast<std::uint16_t>(whole(*arguments, "flags", 0, kWord));
    slice.unit = static_cast<std::int32_t>(whole(*arguments, "unit", -1, kInt));
    slice.micro_batch = static_cast<std::int32_t>(whole(*arguments, "micro_batch", -1, kInt));
    slice.step = whole(*arguments, "step", 0, std::numeric_limits<std::int64_t>::max()) - 1;
    slice.begin = 1e-6 * microseconds(event, "ts");
    slice.end = slice.begin + 1e-6 * microseconds(event, "dur");
    trace_.slices.push_back(slice);
  }

  [[nodiscard]] plan::TaskKind kind_of(const json& event) const {
    const json* name = member(event, "cat");
    if (name == nullptr || !name->is_string()) fail("has no cat");
    for (int k = 0; k < plan::kTaskKinds; ++k) {
      const auto kind = static_cast<plan::TaskKind>(k);
      if (*name == plan::task_kind_name(kind)) return kind;
    }
    fail(fmt::format("is of an unknown kind '{}'", name->get<std::string>()));
  }

  [[nodiscard]] std::int64_t whole(const json& object, const char* key, std::int64_t least, std::int64_t most) const {
    const json* value = member(object, key);
    if (value == nullptr || !value->is_number_integer()) fail(fmt::format("has no whole number {}", key));
    const bool huge = value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(most);
    const std::int64_t number = huge ? most : value->get<std::int64_t>();
    if (huge || number < least || number > most) fail(fmt::format("has a {} out of range: {}", key, value->dump()));
    return number;
  }

  [[nodiscard]] double microseconds(const json& event, const char* key) const {
    constexpr double kYear = 3.2e13;
    const json* value = member(event, key);
    const double number = value != nullptr && value->is_number() ? value->get<double>() : -1;
    if (!(number >= 0 && number < kYear)) fail(fmt::format("has no {} in microseconds", key));
    return number;
  }

  static const json* member(const json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() ? nullptr : &*found;
  }

  [[noreturn]] void fail(const std::string& what) const {
    const std::string subject = number_ == 0 ? "the trace" : fmt::format("event {} of the trace", number_);
    throw Error(fmt::format("{} {}", subject, what), file_, kExpected);
  }

  std::string file_;
  bool in_events_ = false;
  std::uint64_t number_ = 0;
  Trace trace_;
};

}  // namespace

Trace read_trace(const std::filesystem::path& file) { return Reader(file).read(); }

}  // namespace spipe::report
