#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/random.h"
#include "spipe/optim/optim.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::optim {
namespace {

using store::Plane;

struct Tensor {
  std::string name;
  std::int64_t elements;
  bool decay;
};

// One store unit of the given tensors, padded as the model's layout pads.
model::ModelShape shape_of(const std::vector<Tensor>& tensors) {
  model::ModelShape shape;
  model::StoreUnit unit;
  for (const Tensor& tensor : tensors) {
    model::Parameter parameter;
    parameter.name = tensor.name;
    parameter.shape = Shape{tensor.elements};
    parameter.offset = unit.elements;
    parameter.decay = tensor.decay;
    unit.elements = round_up(parameter.offset + parameter.elements(), 128);
    unit.parameters.push_back(parameter);
  }
  shape.store_units.push_back(unit);
  return shape;
}

const std::vector<Tensor> kMixed = {{"a", 1000, true}, {"b", 7, true},   {"c", 129, false},
                                    {"d", 1, false},   {"e", 128, true}, {"f", 3001, false}};

void set_grad(Ptr grad, std::uint64_t i, float value) {
  if (grad.dtype == DType::f32) {
    static_cast<float*>(grad.data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(grad.data)[i] = bf16_from_f32(value);
  }
}

float get_grad(Ptr grad, std::uint64_t i) {
  return grad.dtype == DType::f32 ? static_cast<float*>(grad.data)[i]
                                  : f32_from_bf16(static_cast<std::uint16_t*>(grad.data)[i]);
}

// Random masters, fresh gradients; padding stays zero.
void fill(const model::ModelShape& shape, store::Store& store, std::uint64_t seed, bool masters) {
  const PhiloxKey key = make_key(seed, 77);
  for (const model::Parameter& parameter : shape.store_units[0].parameters) {
    for (std::uint64_t i = parameter.offset; i < parameter.offset + parameter.elements(); ++i) {
      set_grad(store.slab(0, Plane::grad), i,
               static_cast<float>(normal_at(key, 0, i) * std::pow(10.0, -static_cast<int>(i % 5))));
      if (masters) {
        store.master(0)[i] = static_cast<float>(normal_at(key, 1, i));
      }
    }
  }
}

struct Expected {
  std::vector<float> p, m, v;
};

// The update of one element, straight from the comment of AdamWArgs.
void step(float& p, float& m, float& v, float grad, const AdamW& h, const UpdateScalars& s, bool decay) {
  const auto t = static_cast<double>(s.t);
  const float g = grad * static_cast<float>(s.grad_scale);
  m = std::fma(static_cast<float>(h.beta1), m, static_cast<float>(1 - h.beta1) * g);
  v = std::fma(static_cast<float>(h.beta2), v, (static_cast<float>(1 - h.beta2) * g) * g);
  const float p1 = p * (decay ? static_cast<float>(1 - s.lr * h.weight_decay) : 1.0F);
  const float denom = std::sqrt(v) * static_cast<float>(1 / std::sqrt(1 - std::pow(h.beta2, t))) + static_cast<float>(h.eps);
  p = std::fma(-static_cast<float>(s.lr / (1 - std::pow(h.beta1, t))), m / denom, p1);
}

UpdateScalars scalars_of(std::int64_t t) {
  UpdateScalars scalars;
  scalars.lr = 1e-2 / static_cast<double>(t);
  scalars.grad_scale = 0.3;
  scalars.t = t;
  return scalars;
}

Expected expected_state(const model::ModelShape& shape, const store::Store& store) {
  const std::uint64_t n = shape.store_units[0].elements;
  const float* p = store.master(0);
  return {std::vector<float>(p, p + n), std::vector<float>(n, 0.0F), std::vector<float>(n, 0.0F)};
}

void advance(const model::ModelShape& shape, const store::Store& store, Expected& state, const AdamW& hyper,
             const UpdateScalars& scalars) {
  for (const model::Parameter& parameter : shape.store_units[0].parameters) {
    for (std::uint64_t i = parameter.offset; i < parameter.offset + parameter.elements(); ++i) {
      step(state.p[i], state.m[i], state.v[i], get_grad(store.slab(0, Plane::grad), i), hyper, scalars, parameter.decay);
    }
  }
}

bool same_bits(const std::vector<float>& a, const void* b) { return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0; }

void check_update(Ops& ops, DType compute) {
  const model::ModelShape shape = shape_of(kMixed);
  store::Store store(shape, store::make_store_layout(shape, store::store_format(compute)));
  fill(shape, store, 5, true);
  Expected state = expected_state(shape, store);
  const AdamW hyper;
  std::uint32_t nonfinite = 0;
  for (std::int64_t t = 1; t <= 3; ++t) {
    fill(shape, store, 10 + static_cast<std::uint64_t>(t), false);
    advance(shape, store, state, hyper, scalars_of(t));
    update_unit(ops, shape.store_units[0], store, 0, hyper, scalars_of(t), &nonfinite);
    // Whole slabs: tensors have the formula's bits, padding is still zero.
    CHECK(same_bits(state.p, store.master(0)));
    CHECK(same_bits(state.m, store.slab(0, Plane::m).data));
    CHECK(same_bits(state.v, store.slab(0, Plane::v).data));
  }
  CHECK(nonfinite == 0);
  if (compute == DType::bf16) {
    const auto* copy = static_cast<const std::uint16_t*>(store.slab(0, Plane::compute).data);
    for (std::size_t i = 0; i < state.p.size(); ++i) {
      REQUIRE(copy[i] == bf16_from_f32_half_up(state.p[i]));
    }
  }
}

}  // namespace

TEST_CASE("the update of a unit has the formula's bits for every tensor, in fp32 and with a bf16 copy") {
  test::ReferenceOps ops;
  check_update(ops, DType::f32);
  check_update(ops, DType::bf16);
}

TEST_CASE("the CPU backend updates with the same bits, whatever its threads") {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const auto ops = make_cpu_ops(pool);
    check_update(*ops, DType::f32);
    check_update(*ops, DType::bf16);
  }
}

TEST_CASE("the reference of these tests tells a wrong decay and a wrong t apart") {
  const AdamW hyper;
  float right = 0.5F, m = 0, v = 0;
  step(right, m, v, 0.25F, hyper, scalars_of(1), true);
  float other = 0.5F;
  m = v = 0;
  step(other, m, v, 0.25F, hyper, scalars_of(1), false);
  CHECK(other != right);
  other = 0.5F;
  m = v = 0;
  step(other, m, v, 0.25F, hyper, scalars_of(2), true);
  CHECK(other != right);
}

TEST_CASE("a gradient of exact zeros leaves undecayed tensors untouched and decays the others") {
  test::ReferenceOps ops;
  const model::ModelShape shape = shape_of({{"w", 200, true}, {"b", 200, false}});
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::f32)));
  for (std::uint64_t i = 0; i < shape.store_units[0].elements; ++i) {
    store.master(0)[i] = 1.0F;
  }
  std::uint32_t nonfinite = 0;
  update_unit(ops, shape.store_units[0], store, 0, AdamW{}, scalars_of(1), &nonfinite);
  CHECK(store.master(0)[0] == static_cast<float>(1 - 1e-2 * 0.1));
  CHECK(store.master(0)[256] == 1.0F);
}

TEST_CASE("a master that no longer fits its bf16 copy is reported") {
  test::ReferenceOps ops;
  const model::ModelShape shape = shape_of({{"b", 3, false}});
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::bf16)));
  store.master(0)[1] = std::numeric_limits<float>::max();
  std::uint32_t nonfinite = 0;
  update_unit(ops, shape.store_units[0], store, 0, AdamW{}, scalars_of(1), &nonfinite);
  CHECK(nonfinite == 1);
}

TEST_CASE("a unit without tensors is updated by doing nothing, and updates count from one") {
  test::ReferenceOps ops;
  model::ModelShape shape;
  shape.store_units.emplace_back();
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::f32)));
  std::uint32_t nonfinite = 0;
  update_unit(ops, shape.store_units[0], store, 0, AdamW{}, scalars_of(1), &nonfinite);
  CHECK(nonfinite == 0);
  CHECK_THROWS_AS(update_unit(ops, shape.store_units[0], store, 0, AdamW{}, UpdateScalars{.t = 0}, &nonfinite), InternalError);
}

// Planes of the second half, back to back in one buffer: shifted to the unit's first element, the compute copy and the master
// that begins right behind it (and twice as wide) are the same address.
TEST_CASE("a piece far from the unit's beginning has its compute copy written, wherever its planes lie") {
  const model::ModelShape shape = shape_of({{"w", 8192, true}});
  const auto& unit = shape.store_units[0];
  const std::uint64_t begin = 4096, count = unit.elements - begin;
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::bf16)));
  fill(shape, store, 5, true);
  alignas(64) std::vector<std::byte> buffer(count * (2 + 2 + 4 + 4 + 4));
  std::byte* grad = buffer.data();
  std::byte* compute = grad + count * 2;
  std::byte* master = compute + count * 2;
  std::memcpy(grad, static_cast<const std::uint16_t*>(store.slab(0, Plane::grad).data) + begin, count * 2);
  std::memcpy(master, store.master(0) + begin, count * 4);
  UnitPlanes planes;
  planes.separate_master = true;
  planes.grad = {grad - begin * 2, DType::bf16};
  planes.compute = {compute - begin * 2, DType::bf16};
  planes.master = reinterpret_cast<float*>(master - begin * 4);
  planes.m = reinterpret_cast<float*>(master + count * 4 - begin * 4);
  planes.v = reinterpret_cast<float*>(master + count * 8 - begin * 4);
  REQUIRE(planes.compute.data == static_cast<void*>(planes.master));
  test::ReferenceOps ops;
  std::uint32_t nonfinite = 0;
  update_elements(ops, unit, planes, planes, begin, unit.elements, AdamW{}, scalars_of(1), &nonfinite);
  update_unit(ops, unit, store, 0, AdamW{}, scalars_of(1), &nonfinite);
  CHECK(std::memcmp(compute, static_cast<const std::uint16_t*>(store.slab(0, Plane::compute).data) + begin, count * 2) == 0);
  CHECK(std::memcmp(master, store.master(0) + begin, count * 4) == 0);
}

}  // namespace spipe::optim
