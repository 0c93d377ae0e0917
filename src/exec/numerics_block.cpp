// What decides the bits of a run, as text.
#include <fmt/core.h>

#include <span>

#include "run_fit.h"
#include "spipe/base/file.h"
#include "spipe/model/families.h"

namespace spipe::exec {

config::NumericsBlock make_numerics(const RunSetup& setup, const device::DeviceInfo& info) {
  const config::Config& c = setup.config;
  const model::Architecture& a = setup.architecture;
  config::NumericsBlock block;
  const auto add = [&block](std::string key, std::string value) {
    block.values.emplace_back(std::move(key), std::move(value));
  };
  const std::string model_text = model::hf_config_text(a, "float32");
  add("model", hash_text(hash64(std::as_bytes(std::span(model_text.data(), model_text.size())))));
  add("data.seq_len", fmt::format("{}", c.data.seq_len));
  add("data.shuffle_seed", fmt::format("{}", c.data.shuffle_seed));
  add("batch.global", fmt::format("{}", c.batch.global));
  add("batch.micro", fmt::format("{}", c.batch.micro));
  add("batch.sum_groups", fmt::format("{}", c.batch.sum_groups));
  add("dtype.compute", std::string(dtype_name(setup.shape.compute)));
  add("dtype.gradient", std::string(dtype_name(setup.format.grad)));
  add("dtype.master", "fp32");  // also when it is kept in two halves: the bits are the same
  add("dtype.moments", std::string(dtype_name(setup.format.moment)));
  add("train.head_chunk", fmt::format("{}", setup.shape.batch.head_chunk));
  add("train.seed", fmt::format("{}", c.train.seed));
  add("train.grad_clip", fmt::format("{:.17g}", c.train.grad_clip));
  add("train.nonfinite", c.train.nonfinite);
  if (const optim::LossScaling& s = setup.loss_scaling; s.dynamic) {
    add("train.loss_scale", fmt::format("dynamic from {} x {} every {} x {} after {} within {}..{}", s.initial, s.growth,
                                        s.window, s.backoff, s.hysteresis, s.minimum, s.maximum));
  } else if (s.scales()) {
    add("train.loss_scale", fmt::format("{}", s.initial));
  }
  if (const optim::SpikeGuard& s = setup.spikes; s.on()) {
    add("train.skip_spikes", fmt::format("{:.17g} of {} after {}", s.threshold, s.window, s.warmup));
  }
  add("train.steps", fmt::format("{}", c.train.steps));
  add("dropout", fmt::format("{:.17g} {:.17g} {:.17g}", a.dropout_embedding, a.dropout_attention_out, a.dropout_mlp_out));
  add("optimizer.type", c.optimizer.type);
  add("optimizer.lr", fmt::format("{:.17g}", c.optimizer.lr));
  const bool sgd = c.optimizer.type == "sgd";
  if (sgd) {
    add("optimizer.momentum", fmt::format("{:.17g}{}", c.optimizer.momentum, c.optimizer.nesterov ? " nesterov" : ""));
  } else {
    add("optimizer.betas", fmt::format("{:.17g} {:.17g}", c.optimizer.beta1, c.optimizer.beta2));
  }
  if (has_second_moment(setup.hyper.rule)) add("optimizer.eps", fmt::format("{:.17g}", c.optimizer.eps));
  add("optimizer.weight_decay", fmt::format("{:.17g}", c.optimizer.weight_decay));
  std::string groups;
  for (const optim::ParameterGroup& g : setup.hyper.groups) {
    groups += fmt::format("{}{} {}", groups.empty() ? "" : "; ", g.pattern, optim::settings_text(g));
  }
  if (!groups.empty()) add("optimizer.groups", groups);
  add("optimizer.schedule", fmt::format("{} warmup {} final {:.17g} decay {}", c.optimizer.schedule.type,
                                        c.optimizer.schedule.warmup, c.optimizer.schedule.final, c.optimizer.schedule.decay));
  add("backend", info.backend);
  const auto comma = info.arithmetic.find(", ");
  add("instruction_set", info.arithmetic.substr(0, comma));
  add("libraries", comma == std::string::npos ? "" : info.arithmetic.substr(comma + 2));
  return block;
}

}  // namespace spipe::exec
