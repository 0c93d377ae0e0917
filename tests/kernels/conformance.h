// The conformance suite: every op of a backend against the reference ops, on shapes chosen to break it.
//
// A case is a function that builds its operands and calls one op. It runs once on the reference (host memory) and once on every
// backend; the outputs are then compared. Backends differ in threads or instruction set; the first is held against the
// reference within the tolerance table of conformance.cpp, the others must give the first one's bits.
// Another backend (CUDA, its emulator) runs the same suite: implement Memory, fill Backends, SPIPE_CONFORMANCE_TESTS(...).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/ops.h"

namespace spipe::test {

// Where a backend's operands live.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  // aligned to 64
  virtual void release(void* pointer) = 0;
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;  // after what was enqueued before
  // For memory that watches its kernels: bytes that they must not touch; bytes that they must not read before they wrote them.
  virtual void forbid(void*, std::size_t) {}
  virtual void poison(void*, std::size_t) {}
};
[[nodiscard]] Memory& plain_memory();

struct Backend {
  std::string name;         // "avx2, 3 threads"
  std::string matmul_bits;  // backends with equal text give equal matmul bits
  Ops* ops = nullptr;
  Memory* memory = nullptr;
  StreamHandle* stream = nullptr;
  bool rounds_probabilities = false;  // attention does, to the type of its operands: another row of tolerances
};
using Backends = std::vector<Backend>;

// The operands of one run of a case, made in the same order with the same content in every run. Each lies between guard bytes;
// outputs that are not accumulated into start as NaN. `shift` moves every operand off its alignment by that many elements.
class Operands {
 public:
  Operands(Memory& memory, std::uint64_t seed, std::int64_t shift = 0);
  ~Operands();
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  // Inputs. Normal-like numbers (spread times a sum of uniforms of variance 1, plus centre).
  ConstPtr input(DType dtype, std::int64_t elements, double spread = 1, double centre = 0);
  ConstPtr input_values(DType dtype, const std::vector<double>& values);
  const float* input_floats(const std::vector<double>& values);
  const std::int32_t* input_ints(const std::vector<std::int32_t>& values);
  // Outputs: poisoned, or with content that the op reads and changes.
  Ptr output(DType dtype, std::int64_t elements);
  Ptr in_place(DType dtype, std::int64_t elements, double spread = 1, double centre = 0);
  Ptr in_place_values(DType dtype, const std::vector<double>& values);
  Ptr accumulated(DType dtype, std::int64_t elements, bool accumulate);  // in_place or output
  float* output_floats(std::int64_t elements);
  std::uint32_t* flag();  // an unsigned output that starts at 0
  void* workspace(std::uint64_t bytes);

  struct Output {
    DType dtype = DType::f32;
    std::vector<std::byte> bytes;
  };
  // Downloads everything; appends to `faults` when a guard or an input changed.
  [[nodiscard]] std::vector<Output> finish(std::vector<std::string>& faults);
  [[nodiscard]] std::uint64_t next_random();

 private:
  struct Buffer;
  enum class Role { input, in_place, output };
  void* add(DType dtype, std::vector<std::byte> content, Role role);
  std::vector<std::byte> random_content(DType dtype, std::int64_t elements, double spread, double centre);

  Memory& memory_;
  std::uint64_t state_;
  std::int64_t shift_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

using Case = std::function<void(Ops&, StreamHandle*, Operands&)>;

// How an op is judged: a row of the tolerance table, and which backends must agree in bits.
struct Judge {
  std::string_view op;
  bool exact = false;   // bits of the reference (any NaN equals any NaN)
  bool matmul = false;  // bits may differ between instruction sets
};
// Runs `body` on the reference and on all backends and says what is wrong, one line a fault. `text` names the case.
[[nodiscard]] std::vector<std::string> find_faults(const Backends& backends, const Judge& judge, const std::string& text,
                                                   const Case& body, std::int64_t shift = 0);
// The same as a test: every fault fails it.
void check(const Backends& backends, const Judge& judge, const std::string& text, const Case& body, std::int64_t shift = 0);

// Worst errors seen by check() so far, as "op dtype error / tolerance" lines.
[[nodiscard]] std::string worst_errors();

inline constexpr DType kFloatTypes[] = {DType::f32, DType::bf16, DType::f16};

// Deterministic case-local randomness for shapes and tokens.
[[nodiscard]] std::vector<std::int32_t> random_tokens(Operands& operands, std::int64_t count, std::int64_t vocab);

void conform_matmul(const Backends& backends);
void conform_column_sum(const Backends& backends);
void conform_layernorm(const Backends& backends);
void conform_rmsnorm(const Backends& backends);
void conform_rope(const Backends& backends);
void conform_attention_forward(const Backends& backends);
void conform_attention_backward(const Backends& backends);
void conform_activation(const Backends& backends);
void conform_gated(const Backends& backends);
void conform_embedding(const Backends& backends);
void conform_softmax_cross_entropy(const Backends& backends);
void conform_dropout(const Backends& backends);
void conform_simple(const Backends& backends);  // add, convert, zero
void conform_finish_gradient(const Backends& backends);
void conform_adamw(const Backends& backends);
void conform_update(const Backends& backends);  // SPIPE_UPDATE_TESTS: a suite of its own, for backends that have all rules

}  // namespace spipe::test

// One test per op; `backends` is an expression of type Backends. Include <catch2/catch.hpp> first. In two parts, as the first
// takes far longer.
#define SPIPE_CONFORMANCE_TESTS(name, backends) \
  SPIPE_CONFORMANCE_ROW_TESTS(name, backends)   \
  SPIPE_CONFORMANCE_ELEMENT_TESTS(name, backends)
#define SPIPE_CONFORMANCE_ROW_TESTS(name, backends)                                           \
  TEST_CASE(name ": matmul") { spipe::test::conform_matmul(backends); }                       \
  TEST_CASE(name ": layernorm") { spipe::test::conform_layernorm(backends); }                 \
  TEST_CASE(name ": rmsnorm") { spipe::test::conform_rmsnorm(backends); }                     \
  TEST_CASE(name ": attention forward") { spipe::test::conform_attention_forward(backends); } \
  TEST_CASE(name ": attention backward") { spipe::test::conform_attention_backward(backends); }
#define SPIPE_CONFORMANCE_ELEMENT_TESTS(name, backends)                                                \
  TEST_CASE(name ": column sum") { spipe::test::conform_column_sum(backends); }                        \
  TEST_CASE(name ": rope") { spipe::test::conform_rope(backends); }                                    \
  TEST_CASE(name ": activations") { spipe::test::conform_activation(backends); }                       \
  TEST_CASE(name ": gated activations") { spipe::test::conform_gated(backends); }                      \
  TEST_CASE(name ": embedding") { spipe::test::conform_embedding(backends); }                          \
  TEST_CASE(name ": softmax cross-entropy") { spipe::test::conform_softmax_cross_entropy(backends); }  \
  TEST_CASE(name ": dropout") { spipe::test::conform_dropout(backends); }                              \
  TEST_CASE(name ": add, convert, zero") { spipe::test::conform_simple(backends); }                    \
  TEST_CASE(name ": finish gradient, bit for bit") { spipe::test::conform_finish_gradient(backends); } \
  TEST_CASE(name ": AdamW, bit for bit") { spipe::test::conform_adamw(backends); }
#define SPIPE_UPDATE_TESTS(name, backends) \
  TEST_CASE(name ": update rules, bit for bit") { spipe::test::conform_update(backends); }
