// How kernels are found at run time. A family <f> is three files:
//   ops_<f>.h        a struct of plain function pointers and SPIPE_DECLARE_TABLES for it;
//   ops_<f>.cpp      the kernels and the table, compiled once for each instruction set in its own namespace (simd.h);
//   cpu_ops_<f>.cpp  the methods of CpuOps: check the arguments, cut the work by shape, call the table's functions on the pool.
// Nothing inline may be shared between the three builds, so these headers hold declarations only.
#pragma once

#include <cstdint>

#include "spipe/base/dtype.h"

#if defined(__x86_64__)
#define SPIPE_DECLARE_TABLES(Type, name) \
  namespace isa_scalar {                 \
  extern const Type name;                \
  }                                      \
  namespace isa_avx2 {                   \
  extern const Type name;                \
  }                                      \
  namespace isa_avx512 {                 \
  extern const Type name;                \
  }
// For callers in namespace spipe::cpu.
#define SPIPE_TABLE(isa, name) \
  ((isa) == Isa::avx512 ? isa_avx512::name : (isa) == Isa::avx2 ? isa_avx2::name : isa_scalar::name)
#else
#define SPIPE_DECLARE_TABLES(Type, name) \
  namespace isa_scalar {                 \
  extern const Type name;                \
  }
#define SPIPE_TABLE(isa, name) ((void)(isa), isa_scalar::name)
#endif
