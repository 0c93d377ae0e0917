// The update of a store unit: AdamW over its planes, one pass over memory.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "spipe/base/error.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

// The scalars of an update, in double, rounded to float once.
AdamWArgs make_args(const AdamW& hyper, const UpdateScalars& scalars, const ParameterRule& rule) {
  const double lr = scalars.lr * rule.lr_scale;
  const auto t = static_cast<double>(scalars.t);
  AdamWArgs args;
  args.grad_scale = static_cast<float>(scalars.grad_scale);
  args.beta1 = static_cast<float>(hyper.beta1);
  args.one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  args.beta2 = static_cast<float>(hyper.beta2);
  args.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  args.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, t)));
  args.eps = static_cast<float>(hyper.eps);
  args.step_size = static_cast<float>(lr / (1 - std::pow(hyper.beta1, t)));
  args.decay = static_cast<float>(1 - lr * rule.weight_decay);
  SPIPE_CHECK(args.eps > 0, "eps is positive in fp32 (a zero moment divides by it)");
  return args;
}

void update_run(Ops& ops, const UnitPlanes& from, const UnitPlanes& to, AdamWArgs args, std::uint64_t begin,
                std::uint64_t end) {
  const auto first = static_cast<std::int64_t>(begin);
  args.grad = offset(Ptr{const_cast<void*>(from.grad.data), from.grad.dtype}, first);
  args.master = to.master + first;
  args.m = to.m + first;
  args.v = to.v + first;
  if (from.master != to.master) {
    args.from_master = from.master + first;
    args.from_m = from.m + first;
    args.from_v = from.v + first;
  }
  args.compute_copy = to.separate_master ? offset(to.compute, first) : Ptr{};
  args.elements = static_cast<std::int64_t>(end - begin);
  ops.adamw(nullptr, args);
}

}  // namespace

UnitPlanes planes_of(const store::Store& store, int unit, int slot) {
  using store::Plane;
  UnitPlanes planes;
  planes.grad = store.slab(unit, Plane::grad, slot);
  planes.compute = store.slab(unit, Plane::compute, slot);
  const Ptr m = store.slab(unit, Plane::m, slot), v = store.slab(unit, Plane::v, slot);
  SPIPE_CHECK(m.dtype == DType::f32 && v.dtype == DType::f32, "this update keeps fp32 moments");
  planes.m = static_cast<float*>(m.data);
  planes.v = static_cast<float*>(v.data);
  planes.separate_master = store.format().separate_master;
  SPIPE_CHECK(planes.separate_master || planes.compute.dtype == DType::f32, "a store without a master plane computes in fp32");
  planes.master =
      static_cast<float*>(planes.separate_master ? store.slab(unit, Plane::master, slot).data : planes.compute.data);
  return planes;
}

// Neighbours with the same rule are updated in one call, so that small tensors cost no call of their own. This walks over the
// padding between them, which stays zero: gradient, moments and master are zero there, and so are m', v' and p' = fma(-s, 0 /
// eps, 0). Ops::adamw works in fixed blocks on all threads of its pool; elements do not depend on each other, so neither the
// grouping nor where a piece ends changes bits.
void update_elements(Ops& ops, const model::StoreUnit& unit, const UnitPlanes& from, const UnitPlanes& to, std::uint64_t begin,
                     std::uint64_t end, const AdamW& hyper, const UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
  SPIPE_CHECK(scalars.t >= 1, "the first update has t = 1");
  SPIPE_CHECK(begin <= end && end <= unit.elements, "elements of the unit are updated");
  const auto& parameters = unit.parameters;
  const auto rule = [&](std::size_t i) { return rule_of(parameters[i], hyper.groups, hyper.weight_decay); };
  for (std::size_t first = 0; first < parameters.size();) {
    const ParameterRule own = rule(first);
    std::size_t last = first;
    while (last + 1 < parameters.size() && rule(last + 1) == own) ++last;
    // To the next group, so that what lies between is written out of place as well.
    const std::uint64_t run_end = last + 1 < parameters.size() ? parameters[last + 1].offset : unit.elements;
    SPIPE_CHECK(parameters[first].offset < run_end, "parameters lie in their slab in ascending order");
    const std::uint64_t run_begin = std::max(parameters[first].offset, begin);
    if (!own.frozen && run_begin < std::min(run_end, end)) {
      AdamWArgs args = make_args(hyper, scalars, own);
      args.nonfinite_master = nonfinite_master;
      update_run(ops, from, to, args, run_begin, std::min(run_end, end));
    }
    first = last + 1;
  }
}

void copy_frozen(store::Store& store, const model::ModelShape& shape, std::span<const ParameterGroup> groups) {
  using store::Plane;
  for (int s = 0; s < shape.store_unit_count(); ++s) {
    if (!store.has(s) || store.layout().slots(s) != 2) continue;
    const int slot = store.slot(s);
    for (const model::Parameter& parameter : shape.store_units[static_cast<std::size_t>(s)].parameters) {
      if (!is_frozen(parameter, groups)) continue;
      for (const Plane plane : {Plane::compute, Plane::master, Plane::m, Plane::v}) {
        if (!store.format().has(plane)) continue;
        const auto first = static_cast<std::int64_t>(parameter.offset);
        const Ptr from = offset(store.slab(s, plane, slot), first), to = offset(store.slab(s, plane, 1 - slot), first);
        std::memcpy(to.data, from.data, parameter.elements() * dtype_size(from.dtype));
      }
    }
  }
}

void update_unit(Ops& host_ops, const model::StoreUnit& unit, store::Store& store, int unit_index, const AdamW& hyper,
                 const UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
  const UnitPlanes planes = planes_of(store, unit_index, store.slot(unit_index));
  update_elements(host_ops, unit, planes, planes, 0, unit.elements, hyper, scalars, nonfinite_master);
}

}  // namespace spipe::optim
