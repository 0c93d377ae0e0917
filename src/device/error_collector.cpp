#include <utility>

#include "spipe/device/device.h"

namespace spipe::device {
namespace {

// Held for a pointer copy only, so a spin lock is enough.
class Guard {
 public:
  explicit Guard(std::atomic_flag& flag) : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Guard() { flag_.clear(std::memory_order_release); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  std::atomic_flag& flag_;
};

}  // namespace

void ErrorCollector::report(std::exception_ptr error) {
  const Guard guard(lock_);
  if (!first_) {
    first_ = std::move(error);
  }
  stopped_.store(1, std::memory_order_release);
}

void ErrorCollector::rethrow() const {
  std::exception_ptr error;
  {
    const Guard guard(lock_);
    error = first_;
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace spipe::device
