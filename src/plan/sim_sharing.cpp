#include "sim_sharing.h"

#include <algorithm>
#include <limits>

namespace spipe::plan {

namespace {
constexpr double kUnlimited = std::numeric_limits<double>::infinity();
}

std::uint32_t Sharing::add_resource(double capacity) {
  resources_.push_back({.capacity = capacity});
  return static_cast<std::uint32_t>(resources_.size() - 1);
}

double Sharing::rate_alone(const Flow& flow) const {
  double rate = flow.cap > 0 ? flow.cap : kUnlimited;
  for (int i = 0; i < flow.use_count; ++i) {
    const Use& use = flow.uses[static_cast<std::size_t>(i)];
    rate = std::min(rate, resources_[use.resource].capacity / use.weight);
  }
  return rate;
}

std::uint32_t Sharing::start(Flow flow, double now, std::vector<End>& changed) {
  std::uint32_t id = static_cast<std::uint32_t>(flows_.size());
  if (free_.empty()) {
    flows_.emplace_back();
    flow_seen_.push_back(0);
  } else {
    id = free_.back();
    free_.pop_back();
  }
  flow.version = flows_[id].version;
  flow.since = now;
  flow.rate = 0;
  flow.active = true;
  flows_[id] = flow;
  if (flow.use_count == 0) {
    set_rate(id, flow.cap > 0 ? flow.cap : kUnlimited, now, changed);
    return id;
  }
  for (int i = 0; i < flow.use_count; ++i) resources_[flow.uses[static_cast<std::size_t>(i)].resource].flows.push_back(id);
  share(flow, now, changed);
  return id;
}

void Sharing::end(std::uint32_t id, double now, std::vector<End>& changed) {
  Flow& flow = flows_[id];
  flow.active = false;
  ++flow.version;
  for (int i = 0; i < flow.use_count; ++i) {
    std::vector<std::uint32_t>& users = resources_[flow.uses[static_cast<std::size_t>(i)].resource].flows;
    users.erase(std::find(users.begin(), users.end(), id));
  }
  free_.push_back(id);
  if (flow.use_count > 0) share(Flow(flow), now, changed);
}

void Sharing::see(std::uint32_t resource) {
  if (resources_[resource].seen) return;
  resources_[resource].seen = true;
  component_resources_.push_back(resource);
}

// All resources and flows that the change can reach.
void Sharing::find_component(const Flow& around) {
  component_resources_.clear();
  component_flows_.clear();
  for (int i = 0; i < around.use_count; ++i) see(around.uses[static_cast<std::size_t>(i)].resource);
  for (std::size_t r = 0; r < component_resources_.size(); ++r) {
    for (const std::uint32_t id : resources_[component_resources_[r]].flows) {
      if (flow_seen_[id] != 0) continue;
      flow_seen_[id] = 1;
      component_flows_.push_back(id);
      for (int i = 0; i < flows_[id].use_count; ++i) see(flows_[id].uses[static_cast<std::size_t>(i)].resource);
    }
  }
  for (const std::uint32_t id : component_flows_) flow_seen_[id] = 0;
  for (const std::uint32_t r : component_resources_) resources_[r].seen = false;
}

// Progressive filling: all rates rise together; a flow stops at its cap or when a resource it uses is full.
void Sharing::share(const Flow& around, double now, std::vector<End>& changed) {
  find_component(around);
  for (const std::uint32_t r : component_resources_) {
    resources_[r].left = resources_[r].capacity;
    resources_[r].weight = 0;
  }
  for (const std::uint32_t id : component_flows_) {
    for (int i = 0; i < flows_[id].use_count; ++i) {
      const Use& use = flows_[id].uses[static_cast<std::size_t>(i)];
      resources_[use.resource].weight += use.weight;
    }
  }
  open_ = component_flows_;
  while (!open_.empty()) {
    double level = kUnlimited;
    for (const std::uint32_t id : open_) {
      const Flow& flow = flows_[id];
      if (flow.cap > 0) level = std::min(level, flow.cap);
      for (int i = 0; i < flow.use_count; ++i) {
        const Resource& resource = resources_[flow.uses[static_cast<std::size_t>(i)].resource];
        level = std::min(level, resource.left / resource.weight);
      }
    }
    const auto is_bound = [&](std::uint32_t id) {
      const Flow& flow = flows_[id];
      const double reach = level * (1 + 1e-12);
      if (flow.cap > 0 && flow.cap <= reach) return true;
      for (int i = 0; i < flow.use_count; ++i) {
        const Resource& resource = resources_[flow.uses[static_cast<std::size_t>(i)].resource];
        if (resource.left / resource.weight <= reach) return true;
      }
      return false;
    };
    // Who is bound is decided before anything is taken away, so that equals are treated equally.
    const auto first_bound = std::stable_partition(open_.begin(), open_.end(), [&](std::uint32_t id) { return !is_bound(id); });
    const std::vector<std::uint32_t> bound(first_bound, open_.end());
    open_.erase(first_bound, open_.end());
    for (const std::uint32_t id : bound) {
      for (int i = 0; i < flows_[id].use_count; ++i) {
        const Use& use = flows_[id].uses[static_cast<std::size_t>(i)];
        Resource& resource = resources_[use.resource];
        resource.left = std::max(0.0, resource.left - level * use.weight);
        resource.weight -= use.weight;
      }
      set_rate(id, level, now, changed);
    }
  }
}

void Sharing::set_rate(std::uint32_t id, double rate, double now, std::vector<End>& changed) {
  Flow& flow = flows_[id];
  if (rate == flow.rate) return;
  if (flow.rate > 0) flow.remaining = std::max(0.0, flow.remaining - flow.rate * (now - flow.since));
  flow.since = now;
  flow.rate = rate;
  ++flow.version;
  changed.push_back({id, now + flow.remaining / rate, flow.version});
}

}  // namespace spipe::plan
