#include "control.h"

#include <algorithm>

namespace spipe::comm {

void ControlBlock::tell(std::string_view why, int exit_code) {
  const std::size_t length = std::min(why.size(), kCauseBytes - 1);
  std::copy_n(why.data(), length, cause.data());
  cause[length] = '\0';
  code.store(exit_code, std::memory_order_relaxed);
  stop.store(1, std::memory_order_release);
}

bool ControlBlock::claim(std::uint32_t owner, std::string_view why, int exit_code) {
  return claim_after(0, owner, why, exit_code);
}

bool ControlBlock::claim_after(std::uint32_t dead_owner, std::uint32_t owner, std::string_view why, int exit_code) {
  if (stop.load(std::memory_order_acquire) != 0) return false;
  if (!claimed.compare_exchange_strong(dead_owner, owner)) return false;
  tell(why, exit_code);
  return true;
}

}  // namespace spipe::comm
