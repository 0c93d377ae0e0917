// The update of a store unit: AdamW in place over its planes, one pass over memory.
#include <algorithm>
#include <cmath>

#include "spipe/base/error.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

// Everything that does not depend on the tensor, in double, rounded to float once.
AdamWArgs make_args(const AdamW& hyper, const UpdateScalars& scalars) {
  const auto t = static_cast<double>(scalars.t);
  AdamWArgs args;
  args.grad_scale = static_cast<float>(scalars.grad_scale);
  args.beta1 = static_cast<float>(hyper.beta1);
  args.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  args.beta2 = static_cast<float>(hyper.beta2);
  args.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  args.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, t)));
  args.eps = static_cast<float>(hyper.eps);
  args.step_size = static_cast<float>(scalars.lr / (1 - std::pow(hyper.beta1, t)));
  SPIPE_CHECK(args.eps > 0, "eps is positive in fp32 (a zero moment divides by it)");
  return args;
}

// The planes of one unit.
struct UnitState {
  Ptr grad, m, v, compute_copy;
  float* master = nullptr;
};

UnitState unit_state(store::Store& store, int unit) {
  using store::Plane;
  UnitState state;
  state.grad = store.slab(unit, Plane::grad);
  state.m = store.slab(unit, Plane::m);
  state.v = store.slab(unit, Plane::v);
  state.master = store.master(unit);
  if (store.format().separate_master) {
    state.compute_copy = store.slab(unit, Plane::compute);
  }
  SPIPE_CHECK(state.m.dtype == DType::f32, "this update keeps fp32 moments");
  return state;
}

void update_run(Ops& ops, const UnitState& state, AdamWArgs args, std::uint64_t begin, std::uint64_t end) {
  const auto first = static_cast<std::int64_t>(begin);
  args.grad = offset(state.grad, first);
  args.master = state.master + first;
  args.m = static_cast<float*>(state.m.data) + first;
  args.v = static_cast<float*>(state.v.data) + first;
  args.compute_copy = state.compute_copy ? offset(state.compute_copy, first) : Ptr{};
  args.elements = static_cast<std::int64_t>(end - begin);
  ops.adamw(nullptr, args);
}

}  // namespace

// Neighbours with the same decay are updated in one call, so that small tensors cost no call of their own. This walks over the
// padding between them, which stays zero: gradient, moments and master are zero there, and so are m', v' and p' = fma(-s, 0 /
// eps, 0). Ops::adamw works in fixed blocks on all threads of its pool; elements do not depend on each other, so the grouping
// does not change bits.
void update_unit(Ops& host_ops, const model::StoreUnit& unit, store::Store& store, int unit_index, const AdamW& hyper,
                 const UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
  SPIPE_CHECK(scalars.t >= 1, "the first update has t = 1");
  if (unit.parameters.empty()) {
    return;
  }
  const UnitState state = unit_state(store, unit_index);
  AdamWArgs args = make_args(hyper, scalars);
  args.nonfinite_master = nonfinite_master;
  const auto decayed = static_cast<float>(1 - scalars.lr * hyper.weight_decay);
  const auto& parameters = unit.parameters;
  for (std::size_t first = 0; first < parameters.size();) {
    std::size_t last = first;
    while (last + 1 < parameters.size() && parameters[last + 1].decay == parameters[first].decay) {
      ++last;
    }
    args.decay = parameters[first].decay ? decayed : 1.0F;
    const std::uint64_t end = parameters[last].offset + parameters[last].elements();
    SPIPE_CHECK(parameters[first].offset < end && end <= unit.elements, "parameters lie in their slab in ascending order");
    update_run(host_ops, state, args, parameters[first].offset, end);
    first = last + 1;
  }
}

}  // namespace spipe::optim
