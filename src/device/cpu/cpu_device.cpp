// The CPU as a device: memory is an arena, streams are threads, copies are copies.
#include <utility>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/error.h"
#include "spipe/base/host.h"
#include "spipe/base/thread_pool.h"
#include "src/device/cpu/cpu_arena.h"
#include "src/device/cpu/cpu_rates.h"
#include "src/device/cpu/cpu_stream.h"

namespace spipe::device {
namespace {

int checked_threads(int threads) {
  if (threads < 1 || threads > 4096) {
    throw Error("the number of threads must be 1..4096, not " + std::to_string(threads), "device.threads",
                "leave it out to use all cores");
  }
  return threads;
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const CpuDeviceOptions& options)
      : compute_pool_(checked_threads(options.threads)),
        update_pool_(checked_threads(options.update_threads), /*low_priority=*/true) {
    const Isa isa = isa_from_name(options.isa);
    ops_ = make_cpu_ops(compute_pool_, isa);
    host_ops_ = make_cpu_ops(update_pool_, isa);
    info_.name = cpu_model_name();
    info_.backend = "cpu";
    info_.arithmetic = std::string(cpu_backend_text(isa));
    info_.threads = options.threads;
  }

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] Ops& ops() override { return *ops_; }
  [[nodiscard]] Ops& host_ops() override { return *host_ops_; }
  [[nodiscard]] std::unique_ptr<Arena> make_arena(std::uint64_t bytes) override { return std::make_unique<CpuArena>(bytes); }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& name, ErrorCollector& errors) override {
    return std::make_unique<CpuStream>(name, errors);
  }
  [[nodiscard]] DeviceRates measure_rates() override { return measure_cpu_rates(*ops_, *host_ops_); }

 private:
  DeviceInfo info_;
  ThreadPool compute_pool_, update_pool_;  // before the ops that run on them
  std::unique_ptr<Ops> ops_, host_ops_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const CpuDeviceOptions& options) { return std::make_unique<CpuDevice>(options); }

}  // namespace spipe::device
