#include "spipe/exec/plan_area.h"

#include <cmath>
#include <new>
#include <type_traits>

namespace spipe::exec {

namespace {

static_assert(std::is_trivially_copyable_v<Verdict>);

template <typename T>
std::span<T> view(std::span<std::byte> bytes) {
  return {std::launder(reinterpret_cast<T*>(bytes.data())), bytes.size() / sizeof(T)};
}

std::uint64_t losses_of(const plan::Plan& plan) { return static_cast<std::uint64_t>(plan.options.micro_batches); }

std::uint64_t unit_norms_of_plan(const plan::Plan& plan) { return kVerdicts * static_cast<std::uint64_t>(plan.store_units); }

}  // namespace

bool Verdict::finite() const { return norm.finite && std::isfinite(loss_sum); }

bool Verdict::overflow() const { return !norm.finite && std::isfinite(loss_sum); }

void PlanArea::reserve(comm::RegionLayout& layout, const std::string& name, const plan::Plan& plan, int ranks_of_host) {
  layout.add_counters(name + ".done", plan.tasks.size());
  layout.add_counters(name + ".seen", static_cast<std::uint64_t>(ranks_of_host));
  layout.add(name + ".losses", losses_of(plan) * sizeof(double));
  layout.add(name + ".verdicts", kVerdicts * sizeof(Verdict));
  layout.add(name + ".unit_norms", unit_norms_of_plan(plan) * sizeof(double));
}

PlanArea PlanArea::of(const comm::HostRegion& region, const std::string& name) {
  PlanArea area;
  area.done = region.counters(name + ".done");
  area.seen = region.counters(name + ".seen");
  area.losses = view<double>(region.bytes(name + ".losses"));
  area.verdicts = view<Verdict>(region.bytes(name + ".verdicts"));
  area.unit_norms = view<double>(region.bytes(name + ".unit_norms"));
  return area;
}

std::uint64_t PlanArea::bytes(const plan::Plan& plan, int ranks_of_host) {
  return (plan.tasks.size() + static_cast<std::uint64_t>(ranks_of_host)) * sizeof(Counter) + kVerdicts * sizeof(Verdict) +
         (losses_of(plan) + unit_norms_of_plan(plan)) * sizeof(double);
}

std::span<double> PlanArea::unit_norms_of(std::uint64_t run) const {
  const std::size_t units = unit_norms.size() / kVerdicts;
  return unit_norms.subspan(run % kVerdicts * units, units);
}

}  // namespace spipe::exec
