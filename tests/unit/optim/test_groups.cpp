#include <catch2/catch.hpp>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"
#include "spipe/base/thread_pool.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

using Catch::Contains;
using store::Plane;

model::ModelShape shape_of(const std::vector<std::pair<std::string, bool>>& tensors, std::int64_t elements = 200) {
  model::ModelShape shape;
  model::StoreUnit unit;
  for (const auto& [name, decay] : tensors) {
    model::Parameter parameter;
    parameter.name = name;
    parameter.shape = Shape{elements};
    parameter.offset = unit.elements;
    parameter.decay = decay;
    unit.elements = round_up(parameter.offset + parameter.elements(), 128);
    unit.parameters.push_back(parameter);
  }
  shape.store_units.push_back(unit);
  return shape;
}

const std::vector<std::pair<std::string, bool>> kLayer = {{"model.layers.0.input_layernorm.weight", false},
                                                          {"model.layers.0.mlp.up_proj.weight", true},
                                                          {"model.layers.0.mlp.up_proj.bias", false},
                                                          {"model.layers.0.self_attn.q_proj.weight", true}};

std::string refusal_of(const std::vector<ParameterGroup>& groups) {
  model::ModelShape shape = shape_of(kLayer);
  try {
    assign_groups(shape, groups, "run.yaml");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUser);
    return error.what();
  }
  return "none";
}

store::StoreLayout fp32_layout(const model::ModelShape& shape) {
  return store::make_store_layout(shape, store::store_format(DType::f32));
}

void fill(store::Store& store, const model::ModelShape& shape, float parameter, float gradient) {
  for (const model::Parameter& p : shape.store_units[0].parameters) {
    for (std::uint64_t i = p.offset; i < p.offset + p.elements(); ++i) {
      store.master(0)[i] = parameter;
      static_cast<float*>(store.slab(0, Plane::grad).data)[i] = gradient;
    }
  }
}

float first_of(store::Store& store, const model::ModelShape& shape, std::size_t parameter) {
  const model::Parameter& p = shape.store_units[0].parameters[parameter];
  for (std::uint64_t i = p.offset; i < p.offset + p.elements(); ++i) CHECK(store.master(0)[i] == store.master(0)[p.offset]);
  return store.master(0)[p.offset];
}

}  // namespace

TEST_CASE("patterns: * is any characters, ? is one, the rest is itself") {
  const std::vector<std::tuple<const char*, const char*, bool>> cases = {{"a.b", "a.b", true},
                                                                         {"a.b", "a.bc", false},
                                                                         {"a.b", "aXb", false},
                                                                         {"*", "", true},
                                                                         {"*", "a.b.c", true},
                                                                         {"*.bias", "x.bias", true},
                                                                         {"*.bias", "bias", false},
                                                                         {"*.bias", "x.bias.y", false},
                                                                         {"a.?.c", "a.1.c", true},
                                                                         {"a.?.c", "a.12.c", false},
                                                                         {"a.*.c", "a.1.2.c", true},
                                                                         {"*a*b*", "xxaxxbxx", true},
                                                                         {"*a*b*", "xxbxxa", false},
                                                                         {"*ab", "aab", true},
                                                                         {"*aab", "aaab", true},
                                                                         {"a**b", "ab", true},
                                                                         {"", "", true},
                                                                         {"", "a", false},
                                                                         {"?", "", false},
                                                                         {"a*", "a", true}};
  for (const auto& [pattern, name, expected] : cases) {
    INFO(pattern << " and " << name);
    CHECK(name_matches(pattern, name) == expected);
  }
}

TEST_CASE("the first group that matches wins, others stay in none") {
  model::ModelShape shape = shape_of(kLayer);
  const std::vector<ParameterGroup> groups = {{"*.bias", 0.0, 1, false}, {"*.mlp.*", {}, 0.5, false}};
  assign_groups(shape, groups, "run.yaml");
  const auto& parameters = shape.store_units[0].parameters;
  CHECK((parameters[0].group == -1 && parameters[1].group == 1 && parameters[2].group == 0 && parameters[3].group == -1));
  CHECK(rule_of(parameters[0], groups, 0.1) == ParameterRule{0, 1, false});
  CHECK(rule_of(parameters[1], groups, 0.1) == ParameterRule{0.1, 0.5, false});
  CHECK(rule_of(parameters[3], groups, 0.1) == ParameterRule{0.1, 1, false});
}

TEST_CASE("a group without tensors is refused with what may have been meant") {
  CHECK_THAT(refusal_of({{"model.layers.0.mlp.up_prj.weight", {}, 1, true}}),
             Contains("run.yaml: optimizer.groups[0]: pattern 'model.layers.0.mlp.up_prj.weight' matches no parameter; did you "
                      "mean 'model.layers.0.mlp.up_proj.weight'?"));
  CHECK_THAT(refusal_of({{"model.layer.*.mlp.up_proj.bias", {}, 1, true}}),
             Contains("did you mean 'model.layers.*.mlp.up_proj.bias'?"));
  CHECK_THAT(refusal_of({{"wte", {}, 1, true}}),
             Contains("names are like 'model.layers.0.input_layernorm.weight' and 'model.layers.*.input_layernorm.weight'; * "
                      "stands for any characters"));
  CHECK_THAT(refusal_of({{"*.mlp.*", {}, 1, true}, {"*.bias", 0.0, 1, false}}),
             Contains("optimizer.groups[1]: pattern '*.bias' only matches parameters of earlier groups; the first group that "
                      "matches wins: put it before them"));
  CHECK_THAT(refusal_of({{"*", {}, 1, true}}), Contains("freezes every parameter"));
}

TEST_CASE("a group's decay and learning rate are what the hand computes, and its neighbours keep the run's") {
  model::ModelShape shape = shape_of(kLayer);
  Hyper hyper{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.5};
  hyper.groups = {{"*layernorm*", 0.2, 0.5, false}, {"*up_proj.weight", 0.0, 2, false}};
  assign_groups(shape, hyper.groups, "");
  store::Store store(shape, fp32_layout(shape));
  fill(store, shape, 1, 0.5);
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  std::uint32_t bad = 0;
  update_unit(*ops, shape.store_units[0], store, 0, hyper, {.lr = 0.1, .grad_scale = 1, .t = 1}, &bad);
  // The first step of AdamW moves by the rate itself, towards minus the gradient's sign.
  CHECK(first_of(store, shape, 0) == Approx(1 * (1 - 0.05 * 0.2) - 0.05).epsilon(1e-6));  // a vector that decays
  CHECK(first_of(store, shape, 1) == Approx(1 - 0.2).epsilon(1e-6));                      // a matrix that does not
  CHECK(first_of(store, shape, 2) == Approx(1 - 0.1).epsilon(1e-6));
  CHECK(first_of(store, shape, 3) == Approx(1 * (1 - 0.1 * 0.5) - 0.1).epsilon(1e-6));
}

TEST_CASE("a scaled rate gives the bits of that rate") {
  model::ModelShape plain = shape_of(kLayer), scaled = plain;
  Hyper hyper, grouped;
  grouped.groups = {{"*", {}, 0.25, false}};
  assign_groups(scaled, grouped.groups, "");
  store::Store a(plain, fp32_layout(plain)), b(scaled, fp32_layout(scaled));
  fill(a, plain, 0.7F, 0.3F);
  fill(b, scaled, 0.7F, 0.3F);
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  std::uint32_t bad = 0;
  for (std::int64_t t = 1; t <= 5; ++t) {
    update_unit(*ops, plain.store_units[0], a, 0, hyper, {.lr = 0.25 * 3e-3, .grad_scale = 1, .t = t}, &bad);
    update_unit(*ops, scaled.store_units[0], b, 0, grouped, {.lr = 3e-3, .grad_scale = 1, .t = t}, &bad);
  }
  for (std::size_t i = 0; i < kLayer.size(); ++i) CHECK(first_of(a, plain, i) == first_of(b, scaled, i));
}

TEST_CASE("frozen parameters keep their bits, whatever their gradient, in place and in a second slot") {
  model::ModelShape shape = shape_of(kLayer);
  Hyper hyper;
  hyper.groups = {{"*.mlp.*", {}, 1, true}};
  assign_groups(shape, hyper.groups, "");
  CHECK(has_frozen(shape.store_units[0], hyper.groups));
  const auto format = store::store_format(DType::bf16);
  const store::StoreLayout layout = store::make_store_layout(shape, format, {true}, {true});
  store::Store store(shape, layout);
  const auto& unit = shape.store_units[0];
  for (std::uint64_t i = 0; i < unit.elements; ++i) {
    static_cast<std::uint16_t*>(store.slab(0, Plane::grad).data)[i] = 0x7f80;  // infinite
  }
  const auto at = [&](Plane plane, int slot, std::size_t p) {
    const Ptr slab = offset(store.slab(0, plane, slot), static_cast<std::int64_t>(unit.parameters[p].offset));
    return std::string(static_cast<const char*>(slab.data), unit.parameters[p].elements() * dtype_size(slab.dtype));
  };
  for (const Plane plane : {Plane::compute, Plane::master, Plane::m, Plane::v}) {
    std::memset(store.slab(0, plane, 0).data, 0x11, layout.slab_bytes(0, plane));
  }
  copy_frozen(store, shape, hyper.groups);
  const std::string compute = at(Plane::compute, 0, 1), moment = at(Plane::m, 0, 2);
  CHECK(at(Plane::compute, 1, 1) == compute);
  CHECK(at(Plane::m, 1, 2) == moment);
  CHECK(at(Plane::m, 1, 0) != at(Plane::m, 0, 0));  // what is trained is not copied
  ThreadPool pool(2);
  const auto ops = make_cpu_ops(pool);
  std::uint32_t bad = 0;
  for (const int target : {1, 0}) {  // out of place, then in place
    const UnitPlanes from = planes_of(store, 0, 0), to = planes_of(store, 0, target);
    update_elements(*ops, unit, from, to, 0, unit.elements, hyper, {.lr = 0.1, .grad_scale = 1, .t = 1}, &bad);
    for (const std::size_t p : {1, 2}) {
      CHECK(at(Plane::master, target, p) == std::string(unit.parameters[p].elements() * 4, 0x11));
      CHECK(at(Plane::v, target, p) == std::string(unit.parameters[p].elements() * 4, 0x11));
    }
    CHECK(at(Plane::compute, target, 1) == compute);
    CHECK(at(Plane::v, target, 3) != std::string(unit.parameters[3].elements() * 4, 0x11));
  }
}

}  // namespace spipe::optim
