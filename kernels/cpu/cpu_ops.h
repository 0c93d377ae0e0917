// The CPU backend of Ops.
#pragma once

#include <memory>
#include <string_view>

#include "kernels/ops.h"
#include "spipe/base/thread_pool.h"

namespace spipe {

enum class Isa : std::uint8_t { scalar, avx2, avx512 };
[[nodiscard]] std::string_view isa_name(Isa isa);
// The widest instruction set that both CPUID and XGETBV allow.
[[nodiscard]] Isa best_isa();
// "auto" or a name; a set this CPU lacks, or an unknown name, throws Error.
[[nodiscard]] Isa isa_from_name(std::string_view name);

// `pool` outlives the returned object. Matmuls are oneDNN (limited to `isa`), everything else our own kernels for `isa`.
// Our own kernels give the same bits on every instruction set (16-lane accumulators, fixed trees, explicit fma); matmuls need
// not.
[[nodiscard]] std::unique_ptr<Ops> make_cpu_ops(ThreadPool& pool, Isa isa = best_isa());

// Text for the numerics block: instruction set and matmul library with version, e.g. "avx512, oneDNN 2.6.3".
[[nodiscard]] std::string_view cpu_backend_text(Isa isa);

}  // namespace spipe
