#include "pipeline_support.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace spipe::plan::testing {

std::string RandomPipeline::text() const {
  return fmt::format(
      "{} ranks {} replicas {} hosts [{}] M {} G {} forward [{}] backward [{}] prefetch {} park {} evaluate {} "
      "save {} units {} tied {}",
      schedule, input.ranks, input.replicas, fmt::join(input.host_of_rank, ","), input.micro_batches, input.sum_groups,
      fmt::join(input.forward_cuts, ","), fmt::join(input.backward_cuts, ","), input.prefetch, input.park, input.evaluate,
      input.save, shape.unit_count(), shape.tied_unit >= 0);
}

void roll(Dice& dice, RandomPipeline& out) {
  SmallModel small;
  small.layers = dice.from(1, 14);
  small.tied = dice.coin();
  small.learned_positions = dice.coin();
  small.vocab = dice.from(50, 600);
  small.hidden = 16 * dice.from(1, 3);
  small.ffn = 16 * dice.from(1, 6);
  small.micro = dice.from(1, 2);
  small.seq_len = dice.from(4, 20);
  out.shape = small_shape(small);
  out.schedule = schedule_names()[static_cast<std::size_t>(dice.from(0, static_cast<int>(schedule_names().size()) - 1))];
  PipelineInput& input = out.input;
  input = {};
  input.shape = &out.shape;
  input.grad_dtype_size = dice.coin() ? 4 : 2;
  input.replicas = dice.from(0, 2) == 0 ? dice.from(2, 3) : 1;
  input.ranks = out.schedule == "streaming-dp" ? dice.from(1, 6) : input.replicas * dice.from(1, input.replicas > 1 ? 3 : 8);
  if (out.schedule == "streaming-dp") input.replicas = 1;
  const int hosts = std::min(input.ranks, dice.coin() ? 1 : dice.from(2, 3));
  const bool in_turn = dice.coin();
  for (int r = 0; r < input.ranks; ++r) input.host_of_rank.push_back(in_turn ? r % hosts : r * hosts / input.ranks);
  input.micro_batches = dice.from(1, 3) == 1 ? dice.from(1, 13) : input.ranks / input.replicas * dice.from(1, 2);
  const int parts = out.schedule == "streaming-dp" ? input.ranks : input.replicas;
  input.sum_groups = dice.from(0, 9) == 0 ? dice.from(1, 7) : parts * dice.from(1, 3);
  const int units = out.shape.unit_count();
  input.backward_cuts = dice.cuts(units);
  if (out.schedule == "gpipe" && dice.from(0, 9) > 0) {
    const int stages = input.ranks / input.replicas;
    input.backward_cuts = every(std::max(1, (units + stages - 1) / stages), units);
  }
  const bool both = out.schedule == "spipe" || out.schedule == "roundpipe" || out.schedule == "streaming-dp";
  if (both || dice.from(0, 19) == 0) input.forward_cuts = dice.cuts(units);
  input.prefetch = dice.from(0, 3) == 0 ? dice.from(0, 3) : 1;
  input.park = dice.coin();
  input.evaluate = dice.from(0, 7) == 0;
  input.save = dice.from(0, 4) == 0;
  if (dice.from(0, 4) == 0) input.fuse_last = dice.coin();
  input.updates = dice.ways(out.shape);
  input.piece_elements = 4096U * static_cast<unsigned>(dice.from(1, 3));
}

}  // namespace spipe::plan::testing
