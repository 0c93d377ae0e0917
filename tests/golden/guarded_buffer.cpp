#include "guarded_buffer.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace spipe::test {
namespace {
constexpr std::align_val_t kAlignment{256};
constexpr std::byte kMark{0xA5};
}  // namespace

void GuardedBuffer::Free::operator()(std::byte* p) const { ::operator delete[](p, kAlignment); }

GuardedBuffer::GuardedBuffer(std::uint64_t bytes)
    : storage_(static_cast<std::byte*>(::operator new[](bytes + 2 * kGuard, kAlignment))), bytes_(bytes) {
  std::fill_n(storage_.get(), bytes + 2 * kGuard, kMark);
  poison();
}

void GuardedBuffer::poison() { std::memset(data(), 0xFF, bytes_); }

bool GuardedBuffer::intact() const {
  const auto marked = [](const std::byte* from) {
    return std::all_of(from, from + kGuard, [](std::byte b) { return b == kMark; });
  };
  return marked(storage_.get()) && marked(storage_.get() + kGuard + bytes_);
}

}  // namespace spipe::test
