// The suite itself: the reference passes it, and ops that break one rule each do not.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>

#include "tests/kernels/conformance.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::test {
namespace {

enum class Defect { none, one_ulp, past_the_end, before_the_start, reads_destination, changes_input, misses_tail, nan };

// The reference's add with one defect; the rest is refused.
class DefectiveOps final : public Ops {
 public:
  explicit DefectiveOps(Defect defect) : defect_(defect) {}
  void add(StreamHandle* stream, const AddArgs& args) override {
    AddArgs done = args;
    if (defect_ == Defect::misses_tail) done.elements -= args.elements % 16;
    float* out = static_cast<float*>(args.out.data);
    const float old = out[0];
    reference_.add(stream, done);
    if (defect_ == Defect::one_ulp) out[args.elements / 2] = std::nextafterf(out[args.elements / 2], INFINITY);
    if (defect_ == Defect::past_the_end) out[args.elements] = 0;
    if (defect_ == Defect::before_the_start) out[-1] = 0;
    if (defect_ == Defect::reads_destination) out[0] += 0 * old;
    if (defect_ == Defect::nan) out[args.elements - 1] = NAN;
    if (defect_ == Defect::changes_input) std::memset(const_cast<void*>(args.a.data), 0, sizeof(float));
  }
  void matmul(StreamHandle*, const MatmulArgs&) override { FAIL(); }
  void column_sum(StreamHandle*, const ColumnSumArgs&) override { FAIL(); }
  void layernorm_forward(StreamHandle*, const LayerNormForwardArgs&) override { FAIL(); }
  void layernorm_backward(StreamHandle*, const LayerNormBackwardArgs&) override { FAIL(); }
  void rmsnorm_forward(StreamHandle*, const RmsNormForwardArgs&) override { FAIL(); }
  void rmsnorm_backward(StreamHandle*, const RmsNormBackwardArgs&) override { FAIL(); }
  void rope(StreamHandle*, const RopeArgs&) override { FAIL(); }
  void attention_forward(StreamHandle*, const AttentionForwardArgs&) override { FAIL(); }
  void attention_backward(StreamHandle*, const AttentionBackwardArgs&) override { FAIL(); }
  void activation_forward(StreamHandle*, const ActivationForwardArgs&) override { FAIL(); }
  void activation_backward(StreamHandle*, const ActivationBackwardArgs&) override { FAIL(); }
  void gated_forward(StreamHandle*, const GatedForwardArgs&) override { FAIL(); }
  void gated_backward(StreamHandle*, const GatedBackwardArgs&) override { FAIL(); }
  void embedding_forward(StreamHandle*, const EmbeddingForwardArgs&) override { FAIL(); }
  void embedding_backward(StreamHandle*, const EmbeddingBackwardArgs&) override { FAIL(); }
  void softmax_cross_entropy(StreamHandle*, const SoftmaxCrossEntropyArgs&) override { FAIL(); }
  void dropout(StreamHandle*, const DropoutArgs&) override { FAIL(); }
  void convert(StreamHandle*, const ConvertArgs&) override { FAIL(); }
  void zero(StreamHandle*, const ZeroArgs&) override { FAIL(); }
  void finish_gradient(StreamHandle*, const FinishGradientArgs&) override { FAIL(); }
  void adamw(StreamHandle*, const AdamWArgs&) override { FAIL(); }
  void update(StreamHandle*, const UpdateArgs&) override { FAIL(); }

 private:
  Defect defect_;
  ReferenceOps reference_;
};

std::vector<std::string> faults_of(std::vector<Defect> defects, bool exact) {
  std::vector<std::unique_ptr<DefectiveOps>> ops;
  Backends backends;
  for (const Defect defect : defects) {
    ops.push_back(std::make_unique<DefectiveOps>(defect));
    backends.push_back({.name = "defective", .ops = ops.back().get(), .memory = &plain_memory()});
  }
  return find_faults(backends, {.op = "add", .exact = exact}, "defect", [](Ops& run, StreamHandle* stream, Operands& op) {
    const ConstPtr a = op.input(DType::f32, 37), b = op.input(DType::f32, 37);
    run.add(stream, {.a = a, .b = b, .out = op.output(DType::f32, 37), .elements = 37});
  });
}

}  // namespace

TEST_CASE("the conformance suite passes ops without a defect") {
  CHECK(faults_of({Defect::none}, true).empty());
  CHECK(faults_of({Defect::none, Defect::none}, false).empty());
}

TEST_CASE("the conformance suite catches every kind of defect") {
  for (const Defect defect : {Defect::past_the_end, Defect::before_the_start, Defect::reads_destination, Defect::changes_input,
                              Defect::misses_tail, Defect::nan}) {
    INFO("defect " << static_cast<int>(defect));
    CHECK(faults_of({defect}, false).size() == 1);
  }
}

TEST_CASE("one ulp fails an exact op, and a second backend whose bits differ") {
  CHECK(faults_of({Defect::one_ulp}, false).empty());
  CHECK(faults_of({Defect::one_ulp}, true).size() == 1);
  CHECK(faults_of({Defect::none, Defect::one_ulp}, false).size() == 1);
}

TEST_CASE("the reference rounds to half types once, not by way of float") {
  // store() rounds a double once: 1 + 2^-8 + 2^-30 lies above the tie that rounding to float first would create.
  std::uint16_t bits = 0;
  store({&bits, DType::bf16}, 0, 1 + 0x1p-8 + 0x1p-30);
  CHECK(bits == 0x3f81);
  store({&bits, DType::f16}, 0, 1 + 0x1p-11 + 0x1p-40);
  CHECK(bits == 0x3c01);
}

}  // namespace spipe::test
