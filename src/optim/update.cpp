// The update of a store unit over its planes, one pass over memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "spipe/base/error.h"
#include "spipe/base/file.h"
#include "spipe/optim/optim.h"

namespace spipe::optim {
namespace {

// The scalars of an update, in double, rounded to float once.
UpdateArgs make_args(const Hyper& hyper, const UpdateScalars& scalars, const ParameterRule& rule) {
  const double lr = scalars.lr * rule.lr_scale;
  const auto t = static_cast<double>(scalars.t);
  const bool adam = has_second_moment(hyper.rule);
  const bool decoupled = hyper.rule == UpdateRule::adamw || hyper.rule == UpdateRule::lion;
  const double beta1 = adam || hyper.rule == UpdateRule::lion ? hyper.beta1 : hyper.momentum;
  UpdateArgs args;
  args.rule = hyper.rule;
  args.grad_scale = static_cast<float>(scalars.grad_scale);
  args.beta1 = static_cast<float>(beta1);
  args.one_minus_beta1 = static_cast<float>(1 - beta1);
  args.beta2 = static_cast<float>(hyper.beta2);
  args.one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  args.step_size = static_cast<float>(lr);
  if (adam) {
    args.inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, t)));
    args.eps = static_cast<float>(hyper.eps);
    args.step_size = static_cast<float>(lr / (1 - std::pow(hyper.beta1, t)));
    SPIPE_CHECK(args.eps > 0, "eps is positive in fp32 (a zero moment divides by it)");
  }
  args.decay = decoupled ? static_cast<float>(1 - lr * rule.weight_decay) : 1.0F;
  args.l2 = decoupled ? 0.0F : static_cast<float>(rule.weight_decay);
  return args;
}

// For rounding at random: differs from unit to unit and from update to update; a unit is known by its first tensor's name.
std::uint32_t moment_key(const model::StoreUnit& unit, std::int64_t t) {
  const std::string& name = unit.parameters.front().name;
  std::uint64_t x = hash64(std::as_bytes(std::span(name.data(), name.size()))) + static_cast<std::uint64_t>(t);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;  // splitmix64's finalizer
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return static_cast<std::uint32_t>(x ^ x >> 31);
}

UpdatePlanes planes_at(const UnitPlanes& planes, std::int64_t first) {
  UpdatePlanes run;
  if (planes.master) run.compute = offset(planes.compute, first);
  run.master = offset(planes.master ? planes.master : planes.compute, first);
  run.m = offset(planes.m, first);
  if (planes.v) run.v = offset(planes.v, first);
  return run;
}

// The op that every backend has for the usual case.
void update_plainly(Ops& ops, const UpdateArgs& args, bool in_place) {
  const auto floats = [](const Ptr& p) { return static_cast<float*>(p.data); };
  AdamWArgs plain;
  plain.grad = args.grad;
  plain.master = floats(args.to.master);
  plain.m = floats(args.to.m);
  plain.v = floats(args.to.v);
  if (!in_place) {
    plain.from_master = floats(args.from.master);
    plain.from_m = floats(args.from.m);
    plain.from_v = floats(args.from.v);
  }
  plain.compute_copy = args.to.compute;
  plain.nonfinite_master = args.nonfinite_master;
  plain.elements = args.elements;
  plain.grad_scale = args.grad_scale;
  plain.beta1 = args.beta1;
  plain.one_minus_beta1 = args.one_minus_beta1;
  plain.beta2 = args.beta2;
  plain.one_minus_beta2 = args.one_minus_beta2;
  plain.decay = args.decay;
  plain.inv_sqrt_bias2 = args.inv_sqrt_bias2;
  plain.eps = args.eps;
  plain.step_size = args.step_size;
  ops.adamw(nullptr, plain);
}

void update_run(Ops& ops, const UnitPlanes& from, const UnitPlanes& to, UpdateArgs args, std::uint64_t begin,
                std::uint64_t end) {
  const auto first = static_cast<std::int64_t>(begin);
  args.grad = offset(from.grad, first);
  args.from = planes_at(from, first);
  args.to = planes_at(to, first);
  args.first_element = begin;
  args.elements = static_cast<std::int64_t>(end - begin);
  const bool plain = args.rule == UpdateRule::adamw && args.to.m.dtype == DType::f32 && args.to.master.dtype == DType::f32;
  plain ? update_plainly(ops, args, from.m.data == to.m.data) : ops.update(nullptr, args);
}

}  // namespace

UpdateRule rule_from_name(const std::string& name, bool nesterov) {
  if (name == "adamw") return UpdateRule::adamw;
  if (name == "adam") return UpdateRule::adam;
  if (name == "lion") return UpdateRule::lion;
  SPIPE_CHECK(name == "sgd", "the config allows no other rule");
  return nesterov ? UpdateRule::sgd_nesterov : UpdateRule::sgd;
}

store::StoreFormat format_for(UpdateRule rule, DType compute, DType moment, bool split) {
  SPIPE_CHECK(moment == DType::f32 || moment == DType::bf16, "moments are fp32 or bf16");
  SPIPE_CHECK(!split || compute == DType::bf16, "the upper half of a split master is a bf16 compute copy");
  store::StoreFormat format = store::store_format(compute);
  format.moment = moment;
  format.second_moment = has_second_moment(rule);
  format.split_master = split;
  if (split) format.separate_master = false;
  return format;
}

UnitPlanes planes_of(const store::Store& store, int unit, int slot) {
  using store::Plane;
  const store::StoreFormat& format = store.format();
  UnitPlanes planes;
  planes.grad = store.slab(unit, Plane::grad, slot);
  planes.compute = store.slab(unit, Plane::compute, slot);
  SPIPE_CHECK(format.has(Plane::master) || format.compute == DType::f32, "a store without a master plane computes in fp32");
  if (format.has(Plane::master)) planes.master = store.slab(unit, Plane::master, slot);
  planes.m = store.slab(unit, Plane::m, slot);
  if (format.has(Plane::v)) planes.v = store.slab(unit, Plane::v, slot);
  return planes;
}

// Neighbours with the same rule are updated in one call, so that small tensors cost no call of their own. This walks over the
// padding between them, which stays zero: gradient, moments and master are zero there, and so are m', v' and p' (rounding at
// random leaves zeros as they are). The ops work in fixed blocks on all threads of their pool; elements do not depend on each
// other, so neither the grouping nor where a piece ends changes bits.
void update_elements(Ops& ops, const model::StoreUnit& unit, const UnitPlanes& from, const UnitPlanes& to, std::uint64_t begin,
                     std::uint64_t end, const Hyper& hyper, const UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
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
      UpdateArgs args = make_args(hyper, scalars, own);
      args.moment_key = moment_key(unit, scalars.t);
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

void update_unit(Ops& host_ops, const model::StoreUnit& unit, store::Store& store, int unit_index, const Hyper& hyper,
                 const UpdateScalars& scalars, std::uint32_t* nonfinite_master) {
  const UnitPlanes planes = planes_of(store, unit_index, store.slot(unit_index));
  update_elements(host_ops, unit, planes, planes, 0, unit.elements, hyper, scalars, nonfinite_master);
}

}  // namespace spipe::optim
