// The calls that the compiler adds to kernels. They are compiled with -fsanitize=thread and some checks of
// -fsanitize=undefined, but without those sanitizers' libraries: these functions stand in for them, so that every access to
// memory and every failed check of a kernel comes to the machine.
#include <fmt/core.h>

#include <string_view>

#include "tests/emulator/machine.h"

using spipe::emulator::Access;
using spipe::emulator::Machine;

namespace {

void access(const void* address, std::size_t bytes, Access kind) {
  Machine* machine = Machine::if_there();
  if (spipe::emulator::in_kernel) {
    machine->access(address, bytes, kind);
  } else if (machine != nullptr) {
    machine->host_access(address, bytes, kind);
  }
}

// The beginnings of the compiler's descriptions of a check.
struct Place {
  const char* file;
  std::uint32_t line, column;
};
struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};

// `format` has a place for `argument`, or none.
template <typename T = int>
[[noreturn]] void fail(const Place& place, const char* format, T argument = {}) {
  const bool of_kernel = spipe::emulator::in_kernel;
  const spipe::emulator::OutsideKernel outside;
  const std::string_view path = place.file;
  const std::string line =
      fmt::format("{} at {}:{}", fmt::format(fmt::runtime(format), argument), path.substr(path.rfind('/') + 1), place.line);
  if (of_kernel) Machine::instance().fault(line);
  fmt::print(stderr, "host code of a kernel file: {}\n", line);
  std::abort();
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define SPIPE_ACCESS(size)                                                       \
  void __tsan_read##size(void* p) { access(p, size, Access::read); }             \
  void __tsan_write##size(void* p) { access(p, size, Access::write); }           \
  void __tsan_unaligned_read##size(void* p) { access(p, size, Access::read); }   \
  void __tsan_unaligned_write##size(void* p) { access(p, size, Access::write); } \
  void __tsan_volatile_read##size(void* p) { access(p, size, Access::read); }    \
  void __tsan_volatile_write##size(void* p) { access(p, size, Access::write); }
SPIPE_ACCESS(1)
SPIPE_ACCESS(2)
SPIPE_ACCESS(4)
SPIPE_ACCESS(8)
SPIPE_ACCESS(16)
#undef SPIPE_ACCESS
void __tsan_read_range(void* p, std::size_t bytes) { access(p, bytes, Access::read); }
void __tsan_write_range(void* p, std::size_t bytes) { access(p, bytes, Access::write); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __ubsan_handle_type_mismatch_v1(TypeMismatch* check, const void* pointer) {
  if (pointer == nullptr) fail(check->place, "a null pointer is used");
  fail(check->place, "misaligned address: an access aligned to {} bytes", 1U << check->log_alignment);
}
void __ubsan_handle_out_of_bounds(Place* place, std::uintptr_t index) {
  fail(*place, "index {} out of an array's bounds", static_cast<std::intptr_t>(index));
}
#define SPIPE_OVERFLOW(name) \
  void __ubsan_handle_##name(Place* place, std::uintptr_t, std::uintptr_t) { fail(*place, "signed integer overflow"); }
SPIPE_OVERFLOW(add_overflow)
SPIPE_OVERFLOW(sub_overflow)
SPIPE_OVERFLOW(mul_overflow)
SPIPE_OVERFLOW(divrem_overflow)
#undef SPIPE_OVERFLOW
void __ubsan_handle_negate_overflow(Place* place, std::uintptr_t) { fail(*place, "signed integer overflow"); }
void __ubsan_handle_shift_out_of_bounds(Place* place, std::uintptr_t, std::uintptr_t) { fail(*place, "shift out of range"); }

}  // extern "C"
