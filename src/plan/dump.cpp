// The plan as text: one line a task, stable from run to run, made for diff.
#include <fmt/format.h>

#include <array>
#include <iterator>

#include "spipe/plan/plan.h"

namespace spipe::plan {

namespace {

constexpr std::array kAccessLetters = {"r", "w", "u"};

std::string joined(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text.empty() ? "-" : text;
}

void append_buffer(std::string& out, const Plan& plan, const Use& use) {
  const Buffer& buffer = plan.buffers[use.buffer];
  auto sink = std::back_inserter(out);
  fmt::format_to(sink, " {}:{}", kAccessLetters[static_cast<std::size_t>(use.access)], buffer_kind_name(buffer.kind));
  if (buffer.unit >= 0) fmt::format_to(sink, ".{}", buffer.unit);
  if (buffer.source >= 0) fmt::format_to(sink, "<{}", buffer.source);
  if (buffer.micro_batch >= 0) fmt::format_to(sink, "/{}", buffer.micro_batch);
  if (plan.hosts() > 1 && (buffer.place == Place::store || buffer.place == Place::host)) {
    fmt::format_to(sink, "#{}", buffer.host);
  }
  if (buffer.place == Place::store && buffer.kind == BufferKind::gradient) out += "@store";
  if (buffer.place == Place::device || buffer.kind == BufferKind::parked || buffer.kind == BufferKind::mailbox ||
      buffer.kind == BufferKind::norm_parts) {
    fmt::format_to(sink, "@{}+{}", buffer.offset, buffer.bytes);
  }
}

void append_task(std::string& out, const Plan& plan, const Task& task) {
  auto sink = std::back_inserter(out);
  fmt::format_to(sink, "{:>6} ", task.id);
  if (plan.ranks > 1) fmt::format_to(sink, "rank {} ", task.rank);
  fmt::format_to(sink, "{:<7} {:<8}", stream_name(task.stream), task_kind_name(task.kind));
  if (task.unit >= 0) fmt::format_to(sink, " unit {}", task.unit);
  if (task.micro_batch >= 0) fmt::format_to(sink, " mb {}", task.micro_batch);
  fmt::format_to(sink, " stage {}", task.stage);
  if ((task.flags & kAccumulate) != 0) out += " accumulate";
  if ((task.flags & kEvaluate) != 0) out += " evaluate";
  if ((task.flags & kRecompute) != 0) out += " recompute";
  if ((task.flags & kLastOfStage) != 0) out += " last";
  if ((task.flags & kSpeculate) != 0) out += " speculate";
  if (task.kind == TaskKind::load || task.kind == TaskKind::unload || task.stream == StreamKind::update) {
    fmt::format_to(sink, " piece {}", task.piece);
  }
  if (task.peer != kNoPeer) fmt::format_to(sink, " peer {} rank {}", task.peer, task.peer_rank);
  if (task.bytes > 0) fmt::format_to(sink, " bytes {}", task.bytes);
  if (task.flops > 0) fmt::format_to(sink, " flops {:.6g}", task.flops);
  out += " | waits";
  for (std::uint32_t i = 0; i < task.wait_count; ++i) {
    const Wait& wait = plan.waits[task.first_wait + i];
    fmt::format_to(sink, " {}{}", wait.task, wait.previous_step ? "'" : "");
  }
  out += " | uses";
  for (std::uint32_t i = 0; i < task.use_count; ++i) append_buffer(out, plan, plan.uses[task.first_use + i]);
  out += '\n';
}

}  // namespace

std::string dump(const Plan& plan) {
  const ScheduleOptions& options = plan.options;
  std::string out = fmt::format(
      "# plan {} {} ranks {} micro_batches {} sum_groups {} forward_cuts {} backward_cuts {} recompute {} park {} prefetch {} "
      "evaluate {} save {}\n",
      options.schedule, options.residency == Residency::in_place ? "in_place" : "streamed", plan.ranks, options.micro_batches,
      options.sum_groups, joined(options.forward_cuts), joined(options.backward_cuts), options.recompute, options.park,
      options.prefetch, options.evaluate, options.save);
  if (plan.ranks > 1) {
    out += fmt::format("# replicas {} fuse_last {} hosts {} homes {} mailboxes", options.replicas, options.fuse_last,
                       joined(plan.host_of_rank), joined(plan.home_of_unit));
    for (const std::uint64_t bytes : plan.mailbox_bytes) out += fmt::format(" {}", bytes);
    out += '\n';
  }
  if (!options.updates.empty()) {
    out += "# updates";
    for (const UpdateWay& way : options.updates) {
      out += fmt::format(" {}{}", placement_name(way.placement), way.speculate ? "+speculate" : "");
    }
    out += fmt::format(" pieces {} resident {}\n", options.piece_elements, plan.resident_bytes);
  }
  out += fmt::format("# tasks {} buffers {} arena {} in_place {} parking {}; a wait with ' is for the step before\n",
                     plan.tasks.size(), plan.buffers.size(), plan.arena_bytes, plan.in_place_bytes, plan.parking_bytes);
  for (const Task& task : plan.tasks) append_task(out, plan, task);
  return out;
}

}  // namespace spipe::plan
