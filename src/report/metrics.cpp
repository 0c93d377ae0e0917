// metrics.jsonl: one JSON object a line, written whole with one system call, so that a reader never sees half a line of a
// running job and a killed job leaves at most its last line torn.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/report/report.h"

namespace spipe::report {
namespace {

using Json = nlohmann::ordered_json;

// Nine significant digits name every fp32 exactly and keep lines readable. JSON has no infinity or NaN: they become null.
Json number(double value, int digits = 9) {
  if (!std::isfinite(value)) {
    return nullptr;
  }
  const std::string text = fmt::format("{:.{}g}", value, digits);
  double rounded = value;
  std::from_chars(text.data(), text.data() + text.size(), rounded);
  return rounded;
}

// The norms of units are for looking at: six digits, so that a line of a deep model stays short.
Json norms(const std::vector<std::pair<std::string, double>>& units) {
  Json json = Json::object();
  for (const auto& [name, norm] : units) json[name] = number(norm, 6);
  return json;
}

std::string line_of(const StepMetrics& metrics) {
  Json json;
  json["step"] = metrics.step;
  json["tokens"] = metrics.tokens;
  json["loss"] = number(metrics.loss);
  json["grad_norm"] = number(metrics.grad_norm);
  json["clip"] = number(metrics.clip);
  if (metrics.loss_scale) {
    json["loss_scale"] = number(*metrics.loss_scale);
  }
  json["lr"] = number(metrics.lr);
  json["tokens_per_s"] = number(metrics.tokens_per_s);
  json["step_seconds"] = number(metrics.step_seconds);
  if (metrics.peak_fraction) {
    json["peak_fraction"] = number(*metrics.peak_fraction);
  }
  json["h2d_bytes_per_s"] = number(metrics.h2d_bytes_per_s);
  json["d2h_bytes_per_s"] = number(metrics.d2h_bytes_per_s);
  json["skipped_steps"] = metrics.skipped_steps;
  if (!metrics.skipped_for.empty()) {
    json["skipped"] = metrics.skipped_for;
  }
  if (metrics.loss_z) {
    json["loss_z"] = number(*metrics.loss_z);
  }
  if (metrics.norm_z) {
    json["norm_z"] = number(*metrics.norm_z);
  }
  if (metrics.taken_back > 0) {
    json["taken_back"] = metrics.taken_back;
  }
  if (!metrics.unit_norms.empty()) {
    json["unit_norms"] = norms(metrics.unit_norms);
  }
  if (metrics.eval_loss) {
    json["eval_loss"] = number(*metrics.eval_loss);
  }
  return json.dump() + '\n';
}

// A whole line of a step that the resumed run will not repeat. Torn lines (the job was killed while writing) are not.
bool keeps(std::string_view line, std::uint64_t resume_step) {
  const Json json = Json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return false;
  }
  const auto step = json.find("step");
  return step != json.end() && step->is_number_unsigned() && step->get<std::uint64_t>() <= resume_step;
}

void cut_after(const std::filesystem::path& file, std::uint64_t resume_step) {
  if (!std::filesystem::is_regular_file(file)) {
    return;
  }
  const std::string old = read_text(file);
  std::string kept;
  for (std::size_t begin = 0; begin < old.size();) {
    const std::size_t end = old.find('\n', begin);
    if (end == std::string::npos) {
      break;  // without its newline a line may be torn
    }
    const std::string_view line(old.data() + begin, end + 1 - begin);
    if (keeps(line, resume_step)) {
      kept += line;
    }
    begin = end + 1;
  }
  if (kept != old) {
    write_text_atomic(file, kept);
  }
}

}  // namespace

struct MetricsWriter::Impl {
  std::filesystem::path file;
  int fd = -1;
  void append(const std::string& line) const;
};

MetricsWriter::MetricsWriter(std::filesystem::path file, std::uint64_t resume_step) : impl_(std::make_unique<Impl>()) {
  impl_->file = std::move(file);
  cut_after(impl_->file, resume_step);
  impl_->fd = ::open(impl_->file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (impl_->fd < 0) {
    throw Error(std::string("cannot write metrics (") + std::strerror(errno) + ")", impl_->file.string(),
                "check the folder, or set log.jsonl: false");
  }
}

MetricsWriter::~MetricsWriter() {
  if (impl_->fd >= 0) {
    ::close(impl_->fd);
  }
}

void MetricsWriter::write(const StepMetrics& metrics) { impl_->append(line_of(metrics)); }

void MetricsWriter::write_sample(std::uint64_t step, const std::string& prompt, const std::string& text, bool ended) {
  const Json json{{"step", step}, {"prompt", prompt}, {"text", text}, {"ended", ended}};
  impl_->append(json.dump() + '\n');
}

void MetricsWriter::Impl::append(const std::string& line) const {
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t count = ::write(fd, line.data() + done, line.size() - done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      throw Error(std::string("cannot write metrics (") + std::strerror(errno) + ")", file.string(),
                  "free space on the disk and resume");
    }
    done += static_cast<std::size_t>(count);
  }
}

}  // namespace spipe::report
