#include "measure_command.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <vector>

#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/base/host.h"
#include "spipe/base/thread_pool.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"
#include "spipe/device/device.h"
#include "spipe/plan/hardware.h"

namespace spipe::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr std::int64_t kElements = std::int64_t{24} << 20;  // 96 MiB an array
constexpr std::int64_t kChunk = std::int64_t{1} << 16;

// a = b + s * c on arrays that no cache holds: bytes read and written per second, the best of several passes.
double triad_rate(int threads) {
  const auto array = [] { return std::make_unique_for_overwrite<float[]>(kElements); };
  const auto a = array(), b = array(), c = array();
  ThreadPool pool(threads);
  const auto pass = [&](auto&& element) {
    pool.parallel_for(kElements / kChunk, [&](std::int64_t chunk, int) {
      for (std::int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; ++i) element(i);
    });
  };
  pass([&](std::int64_t i) { a[i] = 0, b[i] = 1, c[i] = static_cast<float>(i % 7); });
  double best = 1e300;
  for (int repetition = 0; repetition < 5; ++repetition) {
    const auto start = Clock::now();
    pass([&](std::int64_t i) { a[i] = b[i] + 0.5F * c[i]; });
    best = std::min(best, seconds_since(start));
  }
  SPIPE_CHECK(a[kElements - 1] == 1.0F + 0.5F * c[kElements - 1], "the triad computed something else");
  return 3.0 * sizeof(float) * static_cast<double>(kElements) / std::max(best, 1e-9);
}

class Removed {  // a file that is gone when the scope ends
 public:
  explicit Removed(Path path) : path_(std::move(path)) {}
  ~Removed() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  Removed(const Removed&) = delete;
  Removed& operator=(const Removed&) = delete;
  [[nodiscard]] const Path& path() const { return path_; }

 private:
  Path path_;
};

// Writing and fsyncing a file in the current folder: what a checkpoint does.
double storage_rate(std::uint64_t bytes) {
  const Removed file(fmt::format("spipe-measure.tmp-{}", ::getpid()));
  if (free_disk_bytes(".") / 2 < bytes) {
    throw Error(fmt::format("less than twice {} free in the current folder", format_bytes(bytes)), "spipe measure",
                "go to the folder that checkpoints will be written to, or give a smaller --storage-size");
  }
  std::vector<std::uint32_t> words(std::size_t{1} << 20);
  std::uint32_t state = 1;  // file systems that compress must not find anything to compress
  for (std::uint32_t& word : words) word = state = state * 1664525U + 1013904223U;
  const auto start = Clock::now();
  FileWriter writer(file.path());
  for (std::uint64_t left = bytes; left > 0;) {
    const auto part = std::as_bytes(std::span(words)).first(std::min<std::uint64_t>(left, words.size() * sizeof(words[0])));
    writer.write(part);
    left -= part.size();
  }
  writer.finish();
  return static_cast<double>(bytes) / std::max(seconds_since(start), 1e-9);
}

// Three digits: a measurement has no more.
double rounded(double rate) {
  if (!(rate > 0)) return 0;
  const double unit = std::pow(10.0, std::floor(std::log10(rate)) - 2);
  return std::round(rate / unit) * unit;
}

// Letters, digits and -_. of the output file's stem: YAML needs no quotes for them.
std::string name_of(const MeasureFlags& flags) {
  if (flags.output.empty()) return "this-machine";
  std::string name = Path(flags.output).stem().string();
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  std::replace_if(
      name.begin(), name.end(), [&](char c) { return !plain(c); }, '-');
  return name;
}

class Measurement {
 public:
  explicit Measurement(const MeasureFlags& flags) : cpus_(usable_cpus()), threads_(flags.threads > 0 ? flags.threads : cpus_) {
    if (threads_ > cpus_) {
      throw Error(
          fmt::format("{} threads for a rank, but {} processor{} may be used here", threads_, cpus_, cpus_ == 1 ? "" : "s"),
          "--threads", "a rank has at most the machine's processors");
    }
    storage_bytes_ = parse_bytes(flags.storage_size);
    const Path folder = Path(flags.output).parent_path();
    if (!folder.empty() && !std::filesystem::is_directory(folder)) {
      throw Error("no such folder", folder.string(), "make it first, or give another --output");
    }
    if (storage_bytes_ == 0) throw Error("nothing to write", "--storage-size", "for example 128 MiB");
    hardware_.name = name_of(flags);
    hardware_.ranks_per_host = cpus_ / threads_;
  }

  void run() {
    device();
    memory();
    host();
  }
  [[nodiscard]] const plan::Hardware& hardware() const { return hardware_; }
  [[nodiscard]] const std::string& table() const { return table_; }
  [[nodiscard]] std::string file_text() const {
    return fmt::format(
        "# Written by `spipe measure` (spipe {}) on {}, {} processor{}: {} rank{} of {} thread{}. Achieved rates, measured\n"
        "# with nothing else running in the same process; measure again on an idle machine if they look low.\n{}",
        version(), device_name_, cpus_, cpus_ == 1 ? "" : "s", hardware_.ranks_per_host,
        hardware_.ranks_per_host == 1 ? "" : "s", threads_, threads_ == 1 ? "" : "s", plan::hardware_text(hardware_));
  }

 private:
  void row(const char* what, const std::string& value, const std::string& how) {
    table_ += fmt::format("{:<22} {:>14}   {}\n", what, value, how);
  }
  void rate(const char* what, double& field, double measured, double unit, const char* unit_name, const std::string& how) {
    field = rounded(measured);
    row(what, fmt::format("{:.3g} {}", field / unit, unit_name), how);
  }
  [[nodiscard]] static std::string on(int threads) { return fmt::format("{} thread{}", threads, threads == 1 ? "" : "s"); }

  void device() {
    const auto rank = device::make_cpu_device({.threads = threads_, .update_threads = threads_});
    device_name_ = rank->info().name;
    const device::DeviceRates rates = rank->measure_rates();
    rate("matrix products", hardware_.matmul_flops, rates.matmul_flops, 1e9, "GFLOP/s",
         fmt::format("1024 x 1024 x 1024, fp32, {}", on(threads_)));
    rate("copies to the device", hardware_.h2d_bytes_per_s, rates.h2d_bytes, 1e9, "GB/s", "memcpy of 64 MiB, 1 thread");
    rate("copies to the host", hardware_.d2h_bytes_per_s, rates.d2h_bytes, 1e9, "GB/s", "the same: one memory");
    rate("updates of a rank", hardware_.update_params_per_s_rank, rates.adam_parameters, 1e9, "G param/s",
         fmt::format("AdamW, fp32 state, {}", on(threads_)));
    double all = rates.adam_parameters;
    if (threads_ != cpus_) {
      all = device::make_cpu_device({.threads = cpus_, .update_threads = cpus_})->measure_rates().adam_parameters;
    }
    rate("updates of the host", hardware_.update_params_per_s, all, 1e9, "G param/s",
         fmt::format("AdamW, fp32 state, {}", on(cpus_)));
  }

  // Arenas and store lie in one memory: half of what is free for each.
  void memory() {
    const HostMemory free = host_memory();
    hardware_.host_bytes = free.available / 2;
    hardware_.memory_bytes = free.available / 2 / static_cast<std::uint64_t>(hardware_.ranks_per_host);
    row("device memory", format_bytes(hardware_.memory_bytes),
        fmt::format("half of the {} available, of {} rank{}", format_bytes(free.available), hardware_.ranks_per_host,
                    hardware_.ranks_per_host == 1 ? "" : "s"));
    row("host memory", format_bytes(hardware_.host_bytes), "the other half");
  }

  void host() {
    const double own = triad_rate(threads_), all = threads_ == cpus_ ? own : triad_rate(cpus_);
    const char* const how = "a = b + s c on 3 x 96 MiB, read and written, {}";
    rate("memory of a rank", hardware_.memory_bytes_per_s, own, 1e9, "GB/s", fmt::format(fmt::runtime(how), on(threads_)));
    rate("memory of the host", hardware_.dram_bytes_per_s, all, 1e9, "GB/s", fmt::format(fmt::runtime(how), on(cpus_)));
    rate("storage", hardware_.storage_bytes_per_s, storage_rate(storage_bytes_), 1e9, "GB/s",
         fmt::format("{} written and fsynced in the current folder", format_bytes(storage_bytes_)));
  }

  int cpus_, threads_;
  std::uint64_t storage_bytes_ = 0;
  plan::Hardware hardware_;
  std::string device_name_, table_;
};

}  // namespace

CLI::App* add_measure_command(CLI::App& app, MeasureFlags& flags) {
  CLI::App* command = app.add_subcommand("measure", "measure this machine and write it as a hardware file");
  command->footer(
      "Examples:\n"
      "  spipe measure                                    one rank with all processors; prints the file\n"
      "  spipe measure --threads 8 --output mine.yaml     ranks of 8 threads, as many as fit\n"
      "  spipe plan run.yaml --hardware mine.yaml         the step of a run, simulated on it\n"
      "Takes a few seconds; other work on the machine lowers what is measured.");
  command->add_option("--output", flags.output, "the hardware file to write (YAML); not given: printed");
  command->add_option("--threads", flags.threads, "threads of one rank; not given: all processors")->check(CLI::Range(1, 4096));
  command
      ->add_option("--storage-size", flags.storage_size, "size of the file that is written to the current folder, and removed")
      ->capture_default_str();
  return command;
}

void run_measure(const MeasureFlags& flags) {
  Measurement measurement(flags);
  measurement.run();
  fmt::print("{}", measurement.table());
  if (flags.output.empty()) {
    fmt::print("\n{}", measurement.file_text());
    return;
  }
  write_text_atomic(flags.output, measurement.file_text());
  fmt::print("written: {}\n", flags.output);
}

}  // namespace spipe::tools
