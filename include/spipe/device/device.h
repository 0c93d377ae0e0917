// A device: memory with a hard budget, streams and counters as events. One interface; device/cpu now.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "kernels/ops.h"
#include "spipe/base/counter.h"

namespace spipe::device {

// The first error of all workers; later ones are dropped. Setting it raises `stopped`, which every wait in the engine watches.
class ErrorCollector {
 public:
  void report(std::exception_ptr error);  // thread safe; first one wins
  [[nodiscard]] bool failed() const { return stopped_.load(std::memory_order_acquire) != 0; }
  [[nodiscard]] const std::atomic<std::uint32_t>* stop_flag() const { return &stopped_; }
  void rethrow() const;  // throws the first error, if any

 private:
  std::atomic<std::uint32_t> stopped_{0};
  mutable std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
  std::exception_ptr first_;
};

// An ordered queue of work on a device. Enqueueing never blocks for long (queues are bounded by the executor's run-ahead) and
// everything runs in order. After an error is collected the remaining work is dropped, so that queues drain quickly. Destroying
// a stream finishes the command that runs and drops the rest: drain() first to keep it.
class Stream {
 public:
  virtual ~Stream() = default;
  // Runs `work` on the stream; it gets the handle to pass to Ops. CPU: on the stream's thread. CUDA: called now, enqueues
  // kernels.
  virtual void run(std::function<void(StreamHandle*)> work) = 0;
  // Later work waits until *counter >= value.
  virtual void wait(const Counter* counter, std::uint64_t value) = 0;
  // Raises *counter to value when all earlier work is done.
  virtual void signal(Counter* counter, std::uint64_t value) = 0;
  // A copy between host memory and device memory (or within one); both stay valid until a later signal.
  virtual void copy(void* destination, const void* source, std::uint64_t bytes) = 0;
  // Blocks the caller until everything enqueued is done (or an error was collected).
  virtual void drain() = 0;
};

// Device memory: one block of exactly the planned size, handed out by static offsets.
class Arena {
 public:
  virtual ~Arena() = default;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  // Checked: [offset, offset + bytes) lies inside.
  [[nodiscard]] virtual void* at(std::uint64_t offset, std::uint64_t bytes) const = 0;
};

struct DeviceInfo {
  std::string name;             // "Intel(R) Xeon(R) ..."
  std::string backend;          // "cpu"
  std::string arithmetic;       // numerics block text, e.g. "avx512, oneDNN 2.6.3"
  int threads = 1;              // compute threads (CPU)
  bool host_accessible = true;  // device code may use store memory in place
};

// Measured once at start, cached by the caller: achieved rates of this device with its present thread count.
struct DeviceRates {
  double matmul_flops = 0;              // FLOP/s of a large fp32 matmul through Ops
  double h2d_bytes = 0, d2h_bytes = 0;  // bytes/s of a copy on an idle machine
  double adam_parameters = 0;           // AdamW parameters/s (fp32 state)
};

class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual const DeviceInfo& info() const = 0;
  [[nodiscard]] virtual Ops& ops() = 0;       // for the compute stream
  [[nodiscard]] virtual Ops& host_ops() = 0;  // for the cpu stream: updates on host memory (its own, low-priority pool)
  // Allocates and touches the arena; throws Error when the system cannot provide it.
  [[nodiscard]] virtual std::unique_ptr<Arena> make_arena(std::uint64_t bytes) = 0;
  // A new stream named for logs ("compute", "h2d", ...); `errors` outlives it.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(const std::string& name, ErrorCollector& errors) = 0;
  [[nodiscard]] virtual DeviceRates measure_rates() = 0;  // about 0.3 s
};

struct CpuDeviceOptions {
  int threads = 1;           // compute pool
  int update_threads = 1;    // update pool, low priority
  std::string isa = "auto";  // "auto", "scalar", "avx2", "avx512"
};
[[nodiscard]] std::unique_ptr<Device> make_cpu_device(const CpuDeviceOptions& options);

}  // namespace spipe::device
