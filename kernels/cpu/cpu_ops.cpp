// Choice of the instruction set, and the backend's name for the numerics block.
#include "kernels/cpu/cpu_ops.h"

#include <fmt/format.h>

#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>

#include "kernels/cpu/cpu_ops_impl.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace spipe {
namespace {

#if defined(__x86_64__)
bool has_f16c() {  // clang's __builtin_cpu_supports does not know it
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool has(Isa isa) {
#if defined(__x86_64__)
  // These builtins ask CPUID and XGETBV: a set counts only when the system saves its registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == Isa::scalar;
}

// oneDNN takes one limit per process, before its first use, and knows nothing below SSE4.1: the first backend made decides,
// so that the scalar backend's matmuls still use SSE. A later backend with another limit keeps the first one's matmuls.
void limit_onednn(Isa isa) {
  static std::once_flag once;
  std::call_once(once, [isa] {
    if (isa == Isa::avx512) return;
    const dnnl::cpu_isa limit = isa == Isa::avx2 ? dnnl::cpu_isa::avx2 : dnnl::cpu_isa::sse41;
    const dnnl::status status = dnnl::set_max_cpu_isa(limit);
    SPIPE_CHECK(status == dnnl::status::success, "oneDNN was used before its instruction set was limited");
  });
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  SPIPE_CHECK(false, "unknown instruction set");
}

Isa best_isa() {
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (has(isa)) return isa;
  }
  return Isa::scalar;
}

Isa isa_from_name(std::string_view name) {
  if (name == "auto") return best_isa();
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (name != isa_name(isa)) continue;
    if (!has(isa)) {
      throw Error(fmt::format("this CPU has no {}", name), "", fmt::format("use auto or {}", isa_name(best_isa())));
    }
    return isa;
  }
  throw Error(fmt::format("unknown instruction set '{}'", name), "", "use auto, scalar, avx2 or avx512");
}

std::unique_ptr<Ops> make_cpu_ops(ThreadPool& pool, Isa isa) {
  SPIPE_CHECK(has(isa), "instruction set not supported by this CPU");
  limit_onednn(isa);
  return std::make_unique<cpu::CpuOps>(pool, isa);
}

std::string_view cpu_backend_text(Isa isa) {
  const auto text = [](Isa i) {
    const dnnl_version_t* v = dnnl_version();
    return fmt::format("{}, oneDNN {}.{}.{}", isa_name(i), v->major, v->minor, v->patch);
  };
  static const std::string texts[] = {text(Isa::scalar), text(Isa::avx2), text(Isa::avx512)};
  return texts[static_cast<int>(isa)];
}

}  // namespace spipe
