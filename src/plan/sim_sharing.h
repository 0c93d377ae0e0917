// Fair shares: flows through resources of limited capacity, max-min fair. Rates change only when a flow starts or ends.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace spipe::plan {

class Sharing {
 public:
  static constexpr int kMaxUses = 3;
  struct Use {
    std::uint32_t resource = 0;
    double weight = 1;  // of the resource per unit of the flow
  };
  struct Flow {
    double remaining = 0, rate = 0, since = 0;
    double cap = 0;  // 0: none
    std::array<Use, kMaxUses> uses{};
    int use_count = 0;
    std::uint32_t version = 0;  // changes with the rate
    bool active = false;
    void use(std::uint32_t resource, double weight) { uses[static_cast<std::size_t>(use_count++)] = {resource, weight}; }
  };
  // Flows whose rate has changed, with the time at which they now end.
  struct End {
    std::uint32_t flow = 0;
    double time = 0;
    std::uint32_t version = 0;
  };

  std::uint32_t add_resource(double capacity);
  [[nodiscard]] double rate_alone(const Flow& flow) const;
  // A flow without cap and uses ends at once. Slots of ended flows are used again.
  std::uint32_t start(Flow flow, double now, std::vector<End>& changed);
  void end(std::uint32_t flow, double now, std::vector<End>& changed);
  [[nodiscard]] bool current(std::uint32_t flow, std::uint32_t version) const {
    return flows_[flow].active && flows_[flow].version == version;
  }

 private:
  struct Resource {
    double capacity = 0;
    std::vector<std::uint32_t> flows;
    double left = 0, weight = 0;  // while rates are found
    bool seen = false;
  };
  void share(const Flow& around, double now, std::vector<End>& changed);
  void find_component(const Flow& around);
  void set_rate(std::uint32_t flow, double rate, double now, std::vector<End>& changed);
  void see(std::uint32_t resource);

  std::vector<Resource> resources_;
  std::vector<Flow> flows_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> component_flows_, component_resources_, open_;  // scratch
  std::vector<std::uint8_t> flow_seen_;
};

}  // namespace spipe::plan
