// Update rules through update_unit against the float64 vectors of tests/golden/data/optim.*, with the tolerances of its README:
// updates 1e-4, state 1e-6 (relative L2).
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "spipe/base/file.h"
#include "spipe/io/safetensors.h"
#include "spipe/optim/optim.h"
#include "tests/kernels/reference_ops.h"

namespace spipe::optim {
namespace {

using store::Plane;

constexpr double kUpdateTolerance = 1e-4;
constexpr double kStateTolerance = 1e-6;

struct Golden {
  nlohmann::json json = nlohmann::json::parse(read_text("tests/golden/data/optim.json"));
  io::SafetensorsFile file{"tests/golden/data/optim.safetensors"};

  std::vector<float> tensor(const std::string& name) const {
    const io::TensorInfo* info = file.find(name);
    REQUIRE(info != nullptr);
    std::vector<float> values(info->elements());
    file.read_f32(*info, values.data());
    return values;
  }
};

double relative_l2(const std::vector<float>& x, const std::vector<float>& reference, const std::vector<float>& origin) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(static_cast<double>(x[i]) - reference[i], 2);
    size += std::pow(static_cast<double>(reference[i]) - origin[i], 2);
  }
  return std::sqrt(error / size);
}

// A store with one parameter of the golden vectors' length, which decays as they do.
struct Problem {
  model::ModelShape shape;
  std::vector<float> p0, grads;

  explicit Problem(const Golden& golden) : p0(golden.tensor("p0")), grads(golden.tensor("grads")) {
    model::Parameter parameter;
    parameter.name = "p";
    parameter.shape = Shape{static_cast<std::int64_t>(p0.size())};
    parameter.decay = true;
    model::StoreUnit unit;
    unit.elements = (p0.size() + 127) / 128 * 128;
    unit.parameters.push_back(parameter);
    shape.store_units.push_back(unit);
  }
  [[nodiscard]] store::StoreLayout layout(UpdateRule rule) const {
    return store::make_store_layout(shape, format_for(rule, DType::f32, DType::f32, false));
  }
  void start(store::Store& store) const { std::memcpy(store.master(0), p0.data(), p0.size() * sizeof(float)); }
  [[nodiscard]] std::vector<float> plane(const store::Store& store, Plane plane) const {
    const auto* data = static_cast<const float*>(store.slab(0, plane).data);
    return {data, data + p0.size()};
  }
};

Hyper hyper_of(const nlohmann::json& entry) {
  const nlohmann::json& hparams = entry.at("hparams");
  Hyper hyper;
  hyper.rule = rule_from_name(entry.at("rule"), hparams.value("nesterov", false));
  hyper.beta1 = hparams.value("beta1", hyper.beta1);
  hyper.beta2 = hparams.value("beta2", hyper.beta2);
  hyper.eps = hparams.value("eps", hyper.eps);
  hyper.momentum = hparams.value("momentum", hyper.momentum);
  hyper.weight_decay = hparams.at("weight_decay").get<double>();
  return hyper;
}

struct Errors {
  double update = 0, m = 0, v = 0;  // worst over steps; after the last step
};

Errors run_case(Ops& ops, const Golden& golden, const std::string& name, const Hyper& hyper) {
  const Problem problem(golden);
  store::Store store(problem.shape, problem.layout(hyper.rule));
  problem.start(store);
  const std::size_t n = problem.p0.size();
  const std::vector<float> trained = golden.tensor(name + ".p");
  const nlohmann::json& rates = golden.json.at("lr");
  Errors errors;
  std::uint32_t nonfinite = 0;
  for (std::size_t step = 0; step < rates.size(); ++step) {
    std::memcpy(store.slab(0, Plane::grad).data, problem.grads.data() + step * n, n * sizeof(float));
    UpdateScalars scalars;
    scalars.lr = rates[step].get<double>();
    scalars.t = static_cast<std::int64_t>(step) + 1;
    update_unit(ops, problem.shape.store_units[0], store, 0, hyper, scalars, &nonfinite);
    const auto begin = trained.begin() + static_cast<std::ptrdiff_t>(step * n);
    const std::vector<float> expected(begin, begin + static_cast<std::ptrdiff_t>(n));
    errors.update = std::max(errors.update, relative_l2(problem.plane(store, Plane::compute), expected, problem.p0));
  }
  const std::vector<float> zeros(n, 0.0F);
  errors.m = relative_l2(problem.plane(store, Plane::m), golden.tensor(name + ".state.m"), zeros);
  if (has_second_moment(hyper.rule))
    errors.v = relative_l2(problem.plane(store, Plane::v), golden.tensor(name + ".state.v"), zeros);
  CHECK(nonfinite == 0);
  return errors;
}

void check_cases(Ops& ops) {
  const Golden golden;
  int cases = 0;
  for (const auto& [name, entry] : golden.json.at("cases").items()) {
    if (entry.at("rule") == "lamb" || entry.at("rule") == "adafactor") continue;  // not built
    ++cases;
    INFO(name);
    const Errors errors = run_case(ops, golden, name, hyper_of(entry));
    CHECK(errors.update < kUpdateTolerance);
    CHECK(errors.m < kStateTolerance);
    CHECK(errors.v < kStateTolerance);
  }
  CHECK(cases == 7);  // AdamW 2, Adam, Lion, SGD 3
}

}  // namespace

TEST_CASE("the reference ops follow the golden vectors of every rule") {
  test::ReferenceOps ops;
  check_cases(ops);
}

TEST_CASE("the CPU backend follows the golden vectors of every rule on every instruction set it has") {
  ThreadPool pool(2);
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa <= best_isa()) {
      INFO(isa_name(isa));
      check_cases(*make_cpu_ops(pool, isa));
    }
  }
}

TEST_CASE("a small mistake in the update exceeds the tolerances") {
  test::ReferenceOps ops;
  const Golden golden;
  const Hyper right = hyper_of(golden.json.at("cases").at("adamw"));
  Hyper wrong = right;
  wrong.beta1 = 0.9001;
  CHECK(run_case(ops, golden, "adamw", wrong).m > kStateTolerance);
  wrong = right;
  wrong.beta2 = 0.9501;
  CHECK(run_case(ops, golden, "adamw", wrong).v > kStateTolerance);
  wrong = right;
  wrong.weight_decay = 0;
  CHECK(run_case(ops, golden, "adamw", wrong).update > kUpdateTolerance);
  wrong = right;
  wrong.eps = 1e-6;
  CHECK(run_case(ops, golden, "adamw", wrong).update > kUpdateTolerance);
  const auto of = [&](const char* name) { return hyper_of(golden.json.at("cases").at(name)); };
  wrong = of("adam_l2");
  wrong.rule = UpdateRule::adamw;
  CHECK(run_case(ops, golden, "adam_l2", wrong).update > kUpdateTolerance);
  wrong = of("lion");
  std::swap(wrong.beta1, wrong.beta2);
  CHECK(run_case(ops, golden, "lion", wrong).update > kUpdateTolerance);
  wrong = of("sgd_nesterov");
  wrong.rule = UpdateRule::sgd;
  CHECK(run_case(ops, golden, "sgd_nesterov", wrong).update > kUpdateTolerance);
  wrong = of("sgd_momentum");
  wrong.momentum = 0.901;
  CHECK(run_case(ops, golden, "sgd_momentum", wrong).m > kStateTolerance);
}

TEST_CASE("a gradient of exact zero leaves an undecayed parameter as it was") {
  test::ReferenceOps ops;
  const Golden golden;
  const Problem problem(golden);
  store::Store store(problem.shape, problem.layout(UpdateRule::adamw));
  problem.start(store);
  const Hyper hyper = hyper_of(golden.json.at("cases").at("adamw_nodecay"));
  std::memcpy(store.slab(0, Plane::grad).data, problem.grads.data(), problem.p0.size() * sizeof(float));
  std::uint32_t nonfinite = 0;
  update_unit(ops, problem.shape.store_units[0], store, 0, hyper, UpdateScalars{.lr = 1e-3}, &nonfinite);
  int zeros = 0;
  for (std::size_t i = 0; i < problem.p0.size(); ++i) {
    if (problem.grads[i] == 0) {
      ++zeros;
      CHECK(store.master(0)[i] == problem.p0[i]);
    } else {
      CHECK(store.master(0)[i] != problem.p0[i]);
    }
  }
  CHECK(zeros > 0);
}

}  // namespace spipe::optim
