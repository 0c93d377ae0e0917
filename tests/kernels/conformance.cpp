// Operands, comparison and the tolerance table of the conformance suite.
#include "tests/kernels/conformance.h"

#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

// Relative L2 error |actual - reference| / |reference| allowed per op and by the dtype of the output.
//  fp32: arithmetic in fp32 against double: unit roundoff is 6e-8; sums of a few hundred terms in 16 lanes stay near 2e-7, and
//    cancellation (norm backward, attention gradients) costs a factor of a few.
//  bf16, fp16: both sides round nearly the same number once (unit roundoffs 2^-9, 2^-12); they differ only where fp32 error
//    moves a value across a rounding boundary, so the difference is far below one rounding. compare() adds one such flip of
//    the largest element, which is all of a tiny tensor's error. attention_backward reads `out` as it was rounded, which the
//    reference recomputes: that rounding comes on top.
//  floor: the size (root mean square) below which a result counts as cancelled to nothing and errors are absolute; inputs are
//    of order 1.
struct Tolerance {
  std::string_view op;
  double f32, bf16, f16;
  double floor = 0;
};
constexpr Tolerance kTolerances[] = {
    {"matmul", 1e-6, 2e-4, 1e-4},
    {"column_sum", 5e-7, 0, 0},
    {"layernorm_forward", 3e-7, 1e-4, 5e-5},
    {"layernorm_backward", 6e-7, 2e-4, 1e-4},
    {"layernorm_far_from_zero", 2e-4, 0, 0},  // fp32 mean of 1000 over a spread of 0.5
    {"rmsnorm_forward", 3e-7, 1e-4, 5e-5},
    {"rmsnorm_backward", 6e-7, 2e-4, 1e-4},
    {"rope", 2e-7, 1e-4, 5e-5},
    {"attention_forward", 1e-6, 1e-4, 5e-5},
    {"attention_backward", 2e-6, 1e-2, 1.5e-3, 0.2},
    // Probabilities, and scores' gradients, rounded to the operands' type (relative error 2^-9, 2^-12, over sqrt(3)).
    {"attention_forward_rounded", 1e-6, 2e-3, 2.5e-4},
    {"attention_backward_rounded", 2e-6, 1e-2, 1.5e-3, 0.2},
    {"activation_forward", 4e-7, 5e-5, 2e-5},
    {"activation_backward", 5e-7, 5e-5, 2e-5},
    {"activation_tail", 5e-6, 0, 0},  // exp of an fp32 argument near -80
    {"gated_forward", 5e-7, 5e-5, 2e-5},
    {"gated_backward", 5e-7, 5e-5, 2e-5},
    {"embedding_forward", 1e-7, 5e-5, 2e-5},
    {"embedding_backward", 6e-7, 0, 0},
    {"softmax_cross_entropy", 2e-6, 0, 0},
    {"softmax_cross_entropy_huge", 1e-6, 0, 0},
    {"dropout", 2e-7, 5e-5, 2e-5},
    {"add", 1e-7, 5e-5, 2e-5},
};

const Tolerance& tolerance_of(std::string_view op) {
  for (const Tolerance& t : kTolerances) {
    if (t.op == op) return t;
  }
  SPIPE_CHECK(false, "no tolerance for this op");
}

constexpr std::size_t kGuard = 64;
constexpr std::byte kGuardByte{0xa5};

class PlainMemory final : public Memory {
 public:
  void* allocate(std::size_t bytes) override { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }
  void release(void* pointer) override { std::free(pointer); }
  void upload(void* device, const void* host, std::size_t bytes) override { std::memcpy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { std::memcpy(host, device, bytes); }
};

std::map<std::string, std::pair<double, double>>& worst() {
  static std::map<std::string, std::pair<double, double>> table;
  return table;
}

// Number of elements that differ in bits, any NaN counting as equal to any NaN.
std::int64_t different_elements(const Operands::Output& a, const Operands::Output& b) {
  const std::size_t size = dtype_size(a.dtype);
  std::int64_t count = 0;
  for (std::size_t i = 0; i * size < a.bytes.size(); ++i) {
    if (std::memcmp(a.bytes.data() + i * size, b.bytes.data() + i * size, size) == 0) continue;
    const bool floating = a.dtype != DType::u32;
    const auto at = static_cast<std::int64_t>(i);
    const bool both_nan =
        floating && std::isnan(load({a.bytes.data(), a.dtype}, at)) && std::isnan(load({b.bytes.data(), b.dtype}, at));
    if (!both_nan) ++count;
  }
  return count;
}

// Relative L2 error and what is allowed; the error is infinite when the two differ in where or how they are not finite.
struct Comparison {
  double error = 0, allowed = 0;
};
Comparison compare(std::string_view op, const Operands::Output& actual, const Operands::Output& expected) {
  const Tolerance& tolerance = tolerance_of(op);
  const DType dtype = expected.dtype;
  const auto elements = static_cast<std::int64_t>(expected.bytes.size() / dtype_size(dtype));
  double difference = 0, square = 0, largest = 0;
  for (std::int64_t i = 0; i < elements; ++i) {
    const double a = load({actual.bytes.data(), dtype}, i), e = load({expected.bytes.data(), dtype}, i);
    if (std::isfinite(a) != std::isfinite(e) || (std::isinf(e) && a != e) || std::isnan(a) != std::isnan(e))
      return {INFINITY, 0};
    if (!std::isfinite(e)) continue;
    difference += (a - e) * (a - e);
    square += e * e;
    largest = std::max(largest, std::fabs(e));
  }
  if (difference == 0) return {};
  const double size = std::max(std::sqrt(square), tolerance.floor * std::sqrt(static_cast<double>(elements)));
  if (size == 0) return {INFINITY, 0};
  const double flip = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 0;  // of the largest element, at most
  const double base = dtype == DType::bf16 ? tolerance.bf16 : dtype == DType::f16 ? tolerance.f16 : tolerance.f32;
  const Comparison result{std::sqrt(difference) / size, base + flip * largest / size};
  auto& seen = worst()[fmt::format("{} {}", op, dtype_name(dtype))];
  if (result.error / result.allowed > seen.first / seen.second || seen.second == 0) seen = {result.error, result.allowed};
  return result;
}

}  // namespace

Memory& plain_memory() {
  static PlainMemory memory;
  return memory;
}

struct Operands::Buffer {
  DType dtype = DType::f32;
  std::byte* base = nullptr;  // guard, content, guard
  std::size_t lead = 0;       // bytes before the content
  std::vector<std::byte> initial;
  bool is_output = false;
};

Operands::Operands(Memory& memory, std::uint64_t seed, std::int64_t shift) : memory_(memory), state_(seed), shift_(shift) {}

Operands::~Operands() {
  for (const auto& buffer : buffers_) memory_.release(buffer->base);
}

std::uint64_t Operands::next_random() {  // splitmix64
  std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void* Operands::add(DType dtype, std::vector<std::byte> content, Role role) {
  auto buffer = std::make_unique<Buffer>();
  buffer->dtype = dtype;
  buffer->lead = kGuard + static_cast<std::size_t>(shift_) * dtype_size(dtype);
  buffer->initial = std::move(content);
  buffer->is_output = role != Role::input;
  std::vector<std::byte> image(buffer->lead + buffer->initial.size() + kGuard, kGuardByte);
  std::copy(buffer->initial.begin(), buffer->initial.end(), image.begin() + static_cast<std::ptrdiff_t>(buffer->lead));
  buffer->base = static_cast<std::byte*>(memory_.allocate(image.size()));
  memory_.upload(buffer->base, image.data(), image.size());
  std::byte* start = buffer->base + buffer->lead;
  memory_.forbid(buffer->base, buffer->lead);
  memory_.forbid(start + buffer->initial.size(), kGuard);
  if (role == Role::output) memory_.poison(start, buffer->initial.size());
  buffers_.push_back(std::move(buffer));
  return start;
}

std::vector<std::byte> Operands::random_content(DType dtype, std::int64_t elements, double spread, double centre) {
  std::vector<std::byte> content(static_cast<std::size_t>(elements) * dtype_size(dtype));
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint64_t r = next_random();
    double sum = 0;  // four uniforms on [-1, 1], variance 4/3
    for (int part = 0; part < 4; ++part) sum += static_cast<double>((r >> (16 * part)) & 0xffff) / 32767.5 - 1;
    store({content.data(), dtype}, i, centre + spread * sum * 0.8660254037844386);
  }
  return content;
}

namespace {

std::vector<std::byte> encode(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> content(values.size() * dtype_size(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) store({content.data(), dtype}, static_cast<std::int64_t>(i), values[i]);
  return content;
}

}  // namespace

ConstPtr Operands::input(DType dtype, std::int64_t elements, double spread, double centre) {
  return {add(dtype, random_content(dtype, elements, spread, centre), Role::input), dtype};
}
ConstPtr Operands::input_values(DType dtype, const std::vector<double>& values) {
  return {add(dtype, encode(dtype, values), Role::input), dtype};
}
const float* Operands::input_floats(const std::vector<double>& values) {
  return static_cast<const float*>(input_values(DType::f32, values).data);
}
const std::int32_t* Operands::input_ints(const std::vector<std::int32_t>& values) {
  std::vector<std::byte> content(values.size() * sizeof(std::int32_t));
  if (!values.empty()) std::memcpy(content.data(), values.data(), content.size());
  return static_cast<const std::int32_t*>(add(DType::i32, std::move(content), Role::input));
}
Ptr Operands::output(DType dtype, std::int64_t elements) {  // all bits set is a NaN in every type
  return {
      add(dtype, std::vector<std::byte>(static_cast<std::size_t>(elements) * dtype_size(dtype), std::byte{0xff}), Role::output),
      dtype};
}
Ptr Operands::in_place(DType dtype, std::int64_t elements, double spread, double centre) {
  return {add(dtype, random_content(dtype, elements, spread, centre), Role::in_place), dtype};
}
Ptr Operands::in_place_values(DType dtype, const std::vector<double>& values) {
  return {add(dtype, encode(dtype, values), Role::in_place), dtype};
}
Ptr Operands::accumulated(DType dtype, std::int64_t elements, bool accumulate) {
  return accumulate ? in_place(dtype, elements) : output(dtype, elements);
}
float* Operands::output_floats(std::int64_t elements) { return static_cast<float*>(output(DType::f32, elements).data); }
std::uint32_t* Operands::flag() {
  return static_cast<std::uint32_t*>(add(DType::u32, std::vector<std::byte>(sizeof(std::uint32_t)), Role::in_place));
}
void* Operands::workspace(std::uint64_t bytes) {  // guarded like an output; its content is no result
  void* pointer = add(DType::u8, std::vector<std::byte>(bytes, std::byte{0xff}), Role::output);
  return pointer;
}

std::vector<Operands::Output> Operands::finish(std::vector<std::string>& faults) {
  std::vector<Output> outputs;
  for (std::size_t index = 0; index < buffers_.size(); ++index) {
    const Buffer& buffer = *buffers_[index];
    const std::size_t size = buffer.initial.size();
    std::vector<std::byte> image(buffer.lead + size + kGuard);
    memory_.download(image.data(), buffer.base, image.size());
    const auto content = image.begin() + static_cast<std::ptrdiff_t>(buffer.lead);
    const auto end = content + static_cast<std::ptrdiff_t>(size);
    const auto is_guard = [](std::byte b) { return b == kGuardByte; };
    if (!std::all_of(image.begin(), content, is_guard)) faults.push_back(fmt::format("wrote before operand {}", index));
    if (!std::all_of(end, image.end(), is_guard)) faults.push_back(fmt::format("wrote beyond operand {}", index));
    if (!buffer.is_output) {
      if (!std::equal(content, end, buffer.initial.begin())) faults.push_back(fmt::format("changed input operand {}", index));
    } else if (buffer.dtype != DType::u8) {
      outputs.push_back({buffer.dtype, std::vector<std::byte>(content, end)});
    }
  }
  return outputs;
}

std::vector<std::string> find_faults(const Backends& backends, const Judge& judge, const std::string& text, const Case& body,
                                     std::int64_t shift) {
  std::vector<std::string> faults;
  if (backends.empty()) return faults;  // nothing to hold against the reference
  const std::uint64_t seed = hash64(std::as_bytes(std::span(text)));
  const auto run = [&](Ops& ops, StreamHandle* stream, Memory& memory) {
    Operands operands(memory, seed, shift);
    body(ops, stream, operands);
    return operands.finish(faults);
  };
  const auto op_of = [&](const Backend& backend) {
    const bool rounded = backend.rounds_probabilities && judge.op.starts_with("attention");
    return std::string(judge.op) + (rounded ? "_rounded" : "");
  };
  ReferenceOps reference;
  const auto expected = run(reference, nullptr, plain_memory());
  SPIPE_CHECK(faults.empty(), "the reference broke the rules: " + faults.front());
  std::map<std::string, std::vector<Operands::Output>> first;  // by the bits that must agree
  for (const Backend& backend : backends) {
    const std::size_t before = faults.size();
    auto actual = run(*backend.ops, backend.stream, *backend.memory);
    const auto same_bits = first.find(judge.matmul ? backend.matmul_bits : std::string());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const bool exact = judge.exact || actual[i].dtype == DType::u32;
      if (same_bits != first.end()) {
        const std::int64_t count = different_elements(actual[i], same_bits->second[i]);
        if (count != 0) faults.push_back(fmt::format("output {}: {} elements not the first backend's bits", i, count));
      } else if (exact) {
        const std::int64_t count = different_elements(actual[i], expected[i]);
        if (count != 0) faults.push_back(fmt::format("output {}: {} elements not the reference's bits", i, count));
      } else if (const Comparison error = compare(op_of(backend), actual[i], expected[i]); !(error.error <= error.allowed)) {
        faults.push_back(
            fmt::format("output {} ({}): error {:.3g} of {:.3g}", i, dtype_name(actual[i].dtype), error.error, error.allowed));
      }
    }
    for (std::size_t i = before; i < faults.size(); ++i) {
      faults[i] = fmt::format("{}, {}, shift {}, {}: {}", judge.op, text, shift, backend.name, faults[i]);
    }
    if (same_bits == first.end()) first[judge.matmul ? backend.matmul_bits : std::string()] = std::move(actual);
  }
  return faults;
}

void check(const Backends& backends, const Judge& judge, const std::string& text, const Case& body, std::int64_t shift) {
  const std::vector<std::string> faults = find_faults(backends, judge, text, body, shift);
  for (const std::string& fault : faults) FAIL_CHECK(fault);
  if (faults.empty()) SUCCEED();
}

std::string worst_errors() {
  std::string text;
  for (const auto& [name, pair] : worst()) text += fmt::format("{:32} worst {:.2e} of {:.2e}\n", name, pair.first, pair.second);
  return text;
}

std::vector<std::int32_t> random_tokens(Operands& operands, std::int64_t count, std::int64_t vocab) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) {
    token = static_cast<std::int32_t>(operands.next_random() % static_cast<std::uint64_t>(vocab));
  }
  return tokens;
}

}  // namespace spipe::test
