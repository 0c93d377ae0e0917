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
void step(float& p, float& m, float& v, float grad, const Hyper& h, const UpdateScalars& s, bool decay) {
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

void advance(const model::ModelShape& shape, const store::Store& store, Expected& state, const Hyper& hyper,
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
  const Hyper hyper;
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
  const Hyper hyper;
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
  update_unit(ops, shape.store_units[0], store, 0, Hyper{}, scalars_of(1), &nonfinite);
  CHECK(store.master(0)[0] == static_cast<float>(1 - 1e-2 * 0.1));
  CHECK(store.master(0)[256] == 1.0F);
}

TEST_CASE("a master that no longer fits its bf16 copy is reported") {
  test::ReferenceOps ops;
  const model::ModelShape shape = shape_of({{"b", 3, false}});
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::bf16)));
  store.master(0)[1] = std::numeric_limits<float>::max();
  std::uint32_t nonfinite = 0;
  update_unit(ops, shape.store_units[0], store, 0, Hyper{}, scalars_of(1), &nonfinite);
  CHECK(nonfinite == 1);
}

TEST_CASE("a unit without tensors is updated by doing nothing, and updates count from one") {
  test::ReferenceOps ops;
  model::ModelShape shape;
  shape.store_units.emplace_back();
  store::Store store(shape, store::make_store_layout(shape, store::store_format(DType::f32)));
  std::uint32_t nonfinite = 0;
  update_unit(ops, shape.store_units[0], store, 0, Hyper{}, scalars_of(1), &nonfinite);
  CHECK(nonfinite == 0);
  CHECK_THROWS_AS(update_unit(ops, shape.store_units[0], store, 0, Hyper{}, UpdateScalars{.t = 0}, &nonfinite), InternalError);
}

namespace {

const UpdateRule kRules[] = {UpdateRule::adamw, UpdateRule::adam, UpdateRule::sgd, UpdateRule::sgd_nesterov, UpdateRule::lion};

struct Form {
  UpdateRule rule;
  DType compute, moment = DType::f32;
  bool split = false;
  [[nodiscard]] store::Store store(const model::ModelShape& shape) const {
    return {shape, store::make_store_layout(shape, format_for(rule, compute, moment, split))};
  }
};

// Masters of a form after some updates from the same start with the same gradients.
std::vector<float> trained(Ops& ops, const model::ModelShape& shape, store::Store& store, UpdateRule rule, int updates = 3) {
  Hyper hyper;
  hyper.rule = rule;
  std::uint32_t nonfinite = 0;
  store::Store start(shape, store::make_store_layout(shape, store::store_format(DType::f32)));
  fill(shape, start, 5, true);
  std::vector<float> values(shape.store_units[0].elements);
  start.read_master(0, 0, values);
  (void)store.write_master(0, 0, values);
  for (std::int64_t t = 1; t <= updates; ++t) {
    fill(shape, store, 10 + static_cast<std::uint64_t>(t), false);
    update_unit(ops, shape.store_units[0], store, 0, hyper, scalars_of(t), &nonfinite);
  }
  CHECK(nonfinite == 0);
  store.read_master(0, 0, values);
  return values;
}

bool same_planes(const store::Store& a, const store::Store& b) {
  for (const Plane plane : {Plane::compute, Plane::master, Plane::m, Plane::v}) {
    const std::uint64_t bytes = a.layout().slab_bytes(0, plane);
    if (bytes > 0 && std::memcmp(a.slab(0, plane).data, b.slab(0, plane).data, bytes) != 0) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("every rule in every form gives one result, whatever the threads, the instruction set and the pieces") {
  const model::ModelShape shape = shape_of({{"a", 70001, true}, {"b", 7, true}, {"c", 129, false}});
  const auto& unit = shape.store_units[0];
  ThreadPool one(1), eight(8);
  const auto plain = make_cpu_ops(one, Isa::scalar), wide = make_cpu_ops(eight);
  for (const UpdateRule rule : kRules) {
    for (const Form& form : {Form{rule, DType::f32}, Form{rule, DType::f32, DType::bf16}, Form{rule, DType::bf16},
                             Form{rule, DType::bf16, DType::bf16}, Form{rule, DType::bf16, DType::f32, true},
                             Form{rule, DType::bf16, DType::bf16, true}}) {
      INFO(static_cast<int>(rule) << " " << dtype_name(form.compute) << " " << dtype_name(form.moment) << " " << form.split);
      store::Store a = form.store(shape), b = form.store(shape), c = form.store(shape);
      (void)trained(*plain, shape, a, rule);
      (void)trained(*wide, shape, b, rule);
      CHECK(same_planes(a, b));
      (void)trained(*wide, shape, c, rule, 2);
      fill(shape, c, 13, false);
      Hyper hyper;
      hyper.rule = rule;
      std::uint32_t nonfinite = 0;
      for (const auto& [begin, end] :
           {std::pair<std::uint64_t, std::uint64_t>{4096, 69632}, {0, 4096}, {69632, unit.elements}}) {
        const UnitPlanes planes = planes_of(c, 0, 0);
        update_elements(*wide, unit, planes, planes, begin, end, hyper, scalars_of(3), &nonfinite);
      }
      CHECK(same_planes(a, c));
    }
  }
}

TEST_CASE("a split master is the fp32 master, and bf16 moments are near fp32 ones without being them") {
  const model::ModelShape shape = shape_of(kMixed);
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  for (const UpdateRule rule : kRules) {
    INFO(static_cast<int>(rule));
    store::Store whole = Form{rule, DType::bf16}.store(shape), split = Form{rule, DType::bf16, DType::f32, true}.store(shape);
    store::Store narrow = Form{rule, DType::bf16, DType::bf16}.store(shape);
    const std::vector<float> expected = trained(*ops, shape, whole, rule);
    CHECK(trained(*ops, shape, split, rule) == expected);
    CHECK(std::memcmp(whole.slab(0, Plane::compute).data, split.slab(0, Plane::compute).data,
                      shape.store_units[0].elements * 2) == 0);
    const std::vector<float> near = trained(*ops, shape, narrow, rule);
    CHECK(near != expected);
    double worst = 0, moved = 0;
    for (std::size_t i = 0; i < near.size(); ++i) worst = std::max<double>(worst, std::abs(near[i] - expected[i]));
    store::Store start = Form{rule, DType::bf16}.store(shape);
    const std::vector<float> before = trained(*ops, shape, start, rule, 0);
    for (std::size_t i = 0; i < near.size(); ++i) moved = std::max<double>(moved, std::abs(before[i] - expected[i]));
    CHECK(worst > 0);
    CHECK(worst < (rule == UpdateRule::lion ? 1.5 : 0.05) * moved);  // Lion's signs may flip where they were undecided
  }
}

TEST_CASE("rounding of bf16 moments is random by unit and update, right in the mean, and leaves zeros alone") {
  const model::ModelShape shape = shape_of({{"w", 40000, false}}), other = shape_of({{"x", 40000, false}});
  test::ReferenceOps ops;
  const auto moments = [&](const model::ModelShape& of, std::int64_t t) {
    store::Store store = Form{UpdateRule::sgd, DType::f32, DType::bf16}.store(of);
    for (std::uint64_t i = 0; i < 39000; ++i) static_cast<float*>(store.slab(0, Plane::grad).data)[i] = 1.001F;
    Hyper hyper;
    hyper.rule = UpdateRule::sgd;
    std::uint32_t nonfinite = 0;
    update_unit(ops, of.store_units[0], store, 0, hyper, UpdateScalars{.lr = 0.1, .t = t}, &nonfinite);
    const auto* m = static_cast<const std::uint16_t*>(store.slab(0, Plane::m).data);
    return std::vector<std::uint16_t>(m, m + of.store_units[0].elements);
  };
  const std::vector<std::uint16_t> first = moments(shape, 1);
  CHECK(first == moments(shape, 1));
  CHECK(first != moments(shape, 2));
  CHECK(first != moments(other, 1));
  double sum = 0;
  for (std::size_t i = 0; i < 39000; ++i) sum += f32_from_bf16(first[i]);
  CHECK(std::abs(sum / 39000 - 1.001) < 1e-4);  // neighbours are 1 and 1.0078: a deviation of 1.3e-5
  for (std::size_t i = 39000; i < first.size(); ++i) REQUIRE(first[i] == 0);
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
  planes.grad = {grad - begin * 2, DType::bf16};
  planes.compute = {compute - begin * 2, DType::bf16};
  planes.master = {master - begin * 4, DType::f32};
  planes.m = {master + count * 4 - begin * 4, DType::f32};
  planes.v = {master + count * 8 - begin * 4, DType::f32};
  REQUIRE(planes.compute.data == planes.master.data);
  test::ReferenceOps ops;
  std::uint32_t nonfinite = 0;
  update_elements(ops, unit, planes, planes, begin, unit.elements, Hyper{}, scalars_of(1), &nonfinite);
  update_unit(ops, unit, store, 0, Hyper{}, scalars_of(1), &nonfinite);
  CHECK(std::memcmp(compute, static_cast<const std::uint16_t*>(store.slab(0, Plane::compute).data) + begin, count * 2) == 0);
  CHECK(std::memcmp(master, store.master(0) + begin, count * 4) == 0);
}

}  // namespace spipe::optim
