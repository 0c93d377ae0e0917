#include "run_facts.h"

#include <fmt/core.h>
#include <unistd.h>

#include "spipe/base/host.h"
#include "spipe/base/units.h"
#include "spipe/base/version.h"

namespace spipe::tools {
namespace {

std::string host_name() {
  char name[256] = "unknown";
  (void)gethostname(name, sizeof(name) - 1);
  return name;
}

report::TextRows environment(const exec::RunSetup& setup, const device::DeviceInfo& info, const device::DeviceRates& rates) {
  const HostMemory memory = host_memory();
  report::TextRows rows = {
      {"program", fmt::format("spipe-train {} ({})", version(), git_commit())},
      {"build", std::string(build_text())},
      {"host", fmt::format("{}, {} processors to use, {} of memory", host_name(), usable_cpus(), format_bytes(memory.total))},
      {"device", fmt::format("{}, {} threads", info.name, info.threads)},
      {"arithmetic", info.arithmetic},
      {"ranks", fmt::format("{} on {} host{}", setup.job.ranks(), setup.job.hosts(), setup.job.hosts() == 1 ? "" : "s")},
  };
  if (rates.matmul_flops > 0) {
    rows.emplace_back("measured", fmt::format("{:.1f} GFLOP/s matmul, {:.1f} GB/s copies, {:.2f} G parameters/s AdamW",
                                              rates.matmul_flops * 1e-9, rates.h2d_bytes * 1e-9, rates.adam_parameters * 1e-9));
  }
  return rows;
}

report::TextRows model(const exec::RunSetup& setup) {
  const model::Architecture& a = setup.architecture;
  const config::Config& c = setup.config;
  return {
      {"family", model::family_name(a.family)},
      {"parameters", format_count(static_cast<double>(setup.shape.parameters()))},
      {"shape", fmt::format("{} layers, hidden {}, {} heads ({} KV) of {}, ffn {}, vocabulary {}{}", a.layers, a.hidden_size,
                            a.heads, a.kv_heads, a.head_dim, a.ffn_size, a.vocab_size, a.tied_embeddings ? ", tied" : "")},
      {"step", fmt::format("{} sequences of {}, in {} micro-batches", c.batch.global, c.data.seq_len, setup.micro_batches)},
      {"precision", fmt::format("compute {}, gradients {}", dtype_name(setup.shape.compute), dtype_name(setup.format.grad))},
      {"numerics", setup.numerics.hash()},
  };
}

void add(std::vector<report::MemoryPart>& parts, std::string name, std::uint64_t bytes) {
  if (bytes > 0) parts.push_back({std::move(name), bytes});
}

}  // namespace

report::RunFacts run_facts(const exec::RunSetup& setup, const device::DeviceInfo& info, const device::DeviceRates& rates,
                           std::uint64_t resume_step) {
  report::RunFacts facts;
  facts.started = report::time_now_text();
  facts.first_step = resume_step;
  facts.total_steps = static_cast<std::uint64_t>(setup.config.train.steps);
  facts.environment = environment(setup, info, rates);
  facts.model = model(setup);
  facts.plan = plan::summary(setup.fit.train);
  const plan::Plan& plan = setup.fit.train;
  std::uint64_t named = 0;
  for (const plan::MemoryUse& use : plan::memory_by_kind(plan)) {
    add(facts.device, plan::buffer_kind_name(use.kind), use.at_peak);
    named += use.at_peak;
  }
  add(facts.device, "store, used in place", plan.in_place_bytes);
  named += plan.in_place_bytes;
  // Gaps between buffers, which no other fits into.
  if (plan.device_bytes() > named) add(facts.device, "between buffers", plan.device_bytes() - named);
  facts.device_limit = setup.config.device.memory.value_or(0);
  add(facts.host, "store (state)", setup.host.store);
  add(facts.host, "device arena", setup.host.arena);
  add(facts.host, "parking", setup.host.parking);
  add(facts.host, "mailboxes", setup.host.mailboxes);
  add(facts.host, "staging", setup.host.staging);
  facts.host_limit = setup.host_limit;
  return facts;
}

}  // namespace spipe::tools
