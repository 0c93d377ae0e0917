#include "tests/emulator/emulated_device.h"

#include "kernels/cuda/cuda_ops.h"
#include "spipe/base/error.h"
#include "tests/emulator/machine.h"

namespace spipe::test {
namespace {

emulator::DeviceHeap& heap() { return emulator::Machine::instance().heap(); }

class EmulatedArena final : public device::Arena {
 public:
  explicit EmulatedArena(std::uint64_t bytes) : bytes_(bytes), data_(heap().allocate(bytes)) { heap().fill(data_, 0, bytes); }
  ~EmulatedArena() override { heap().release(data_); }
  EmulatedArena(const EmulatedArena&) = delete;
  EmulatedArena& operator=(const EmulatedArena&) = delete;
  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] void* at(std::uint64_t offset, std::uint64_t bytes) const override {
    SPIPE_CHECK(offset <= bytes_ && bytes <= bytes_ - offset, "outside of the arena");
    return data_ + offset;
  }

 private:
  std::uint64_t bytes_;
  std::byte* data_;
};

class EmulatedDevice final : public device::Device {
 public:
  EmulatedDevice() : host_(device::make_cpu_device({})), scratch_(kCudaScratchBytes), info_(host_->info()) {
    ops_ = make_cuda_ops(scratch_.at(0, kCudaScratchBytes));
    info_.name = "emulated CUDA device";
    info_.backend = "cuda";
    info_.arithmetic = "emulated CUDA kernels";
    info_.host_accessible = false;
  }
  [[nodiscard]] const device::DeviceInfo& info() const override { return info_; }
  [[nodiscard]] Ops& ops() override { return *ops_; }
  [[nodiscard]] Ops& host_ops() override { return host_->host_ops(); }
  [[nodiscard]] std::unique_ptr<device::Arena> make_arena(std::uint64_t bytes) override {
    return std::make_unique<EmulatedArena>(bytes);
  }
  [[nodiscard]] std::unique_ptr<device::Stream> make_stream(const std::string& name, device::ErrorCollector& errors) override {
    return host_->make_stream(name, errors);
  }
  [[nodiscard]] device::DeviceRates measure_rates() override { return host_->measure_rates(); }

 private:
  std::unique_ptr<device::Device> host_;
  EmulatedArena scratch_;
  device::DeviceInfo info_;
  std::unique_ptr<Ops> ops_;
};

}  // namespace

std::unique_ptr<device::Device> make_emulated_device() { return std::make_unique<EmulatedDevice>(); }

}  // namespace spipe::test
