#include "saver.h"

#include <span>
#include <string>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/model/families.h"

namespace spipe::exec {

using Clock = std::chrono::steady_clock;

std::unique_ptr<io::CheckpointWriter> Saver::make_writer(const TrainerState& state) const {
  const DType compute = setup_.shape.compute;
  const char* dtype = compute == DType::bf16 ? "bfloat16" : compute == DType::f16 ? "float16" : "float32";
  const io::CheckpointPart part{.host_of_unit = setup_.host_of_unit(), .host = world_.host(), .leader = world_.rank() == 0};
  return std::make_unique<io::CheckpointWriter>(setup_.config.checkpoint.dir, state.step, setup_.shape, store_,
                                                trainer_json(state, setup_), model::hf_config_text(setup_.architecture, dtype),
                                                part);
}

void Saver::begin(const TrainerState& state) {
  SPIPE_CHECK(!finishing_.valid(), "one save at a time");
  begin_ = Clock::now();
  step_ = state.step;
  // The leader makes the folder in which all write.
  if (leads()) writer_ = make_writer(state);
  if (world_.hosts() > 1) world_.barrier();
  if (writes() && !leads()) writer_ = make_writer(state);
}

void Saver::unit(int store_unit) {
  SPIPE_CHECK(writer_ != nullptr, "units are saved on the first rank of their host");
  writer_->unit(store_unit);
}

void Saver::end() {
  std::vector<std::string> parts;
  if (world_.hosts() > 1) {
    const std::string own = writes() && !leads() ? writer_->part_manifest() : std::string();
    for (const auto& bytes : world_.all_gather(std::as_bytes(std::span(own)))) {
      if (!bytes.empty()) parts.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    if (!leads()) writer_.reset();
  }
  if (leads()) {
    finishing_ = std::async(std::launch::async, [this, parts = std::move(parts)] { return writer_->finish(parts); });
  }
}

void Saver::whole(const TrainerState& state) {
  world_.barrier();
  begin(state);
  if (writes()) {
    for (int s = 0; s < setup_.shape.store_unit_count(); ++s) {
      if (store_.has(s)) unit(s);
    }
  }
  end();
}

std::optional<Saver::Saved> Saver::take(bool wait) {
  if (!finishing_.valid()) return std::nullopt;
  if (!wait && finishing_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return std::nullopt;
  Saved saved;
  saved.path = finishing_.get().path;
  saved.step = *step_;
  saved.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  writer_.reset();
  return saved;
}

}  // namespace spipe::exec
