#include <catch2/catch.hpp>

#include "spipe/model/shape.h"
#include "spipe/plan/builder.h"

using namespace spipe;
using namespace spipe::plan;

namespace {

model::ModelShape small_shape(bool tied) {
  model::Architecture a;
  a.vocab_size = 300;
  a.hidden_size = 32;
  a.layers = 3;
  a.heads = a.kv_heads = 2;
  a.head_dim = 16;
  a.ffn_size = 64;
  a.tied_embeddings = tied;
  return model::make_shape(a, {.micro = 2, .seq_len = 16, .head_chunk = 16}, DType::f32);
}

}  // namespace

TEST_CASE("the dump of a plan is the same every time") {
  const model::ModelShape shape = small_shape(true);
  const ScheduleInput input{.shape = &shape};
  ScheduleOptions options;
  options.residency = Residency::streamed;
  options.backward_cuts = {0, 2};
  options.micro_batches = 3;
  options.recompute = true;
  const Plan first = schedule_streaming(input, options), second = schedule_streaming(input, options);
  CHECK(dump(first) == dump(second));
  CHECK(plan_hash(first) == plan_hash(second));
  options.prefetch = 0;
  CHECK(plan_hash(first) != plan_hash(schedule_streaming(input, options)));
}
