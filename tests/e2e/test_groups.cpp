// Parameter groups on one rank: frozen tensors keep their bits and count nowhere, settings of a group reach its tensors only,
// and nobody's way of updating changes a bit. Ranks: policy_matrix.
#include <catch2/catch.hpp>
#include <limits>

#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/io/safetensors.h"
#include "tests/support/tiny_run.h"

using namespace spipe;
using namespace spipe::test;

namespace {

const bool kQuiet = (init_logging(LogLevel::error), true);
const std::string kGroups =
    "optimizer.groups=[{pattern: model.embed_tokens.weight, frozen: true}, {pattern: \"model.layers.1.*\", frozen: true}, "
    "{pattern: \"*.up_proj.weight\", frozen: true}, {pattern: \"*.mlp.*\", lr_scale: 0.25, weight_decay: 0}, "
    "{pattern: \"*norm*\", weight_decay: 0.3}]";

using Tensors = std::map<std::string, std::string>;

struct Trained {
  TinyResult result;
  Tensors tensors;
};

Trained run_in(const std::filesystem::path& folder, std::vector<std::string> settings, exec::RunOptions options = {}) {
  TinyRun run;
  run.model_json = tiny_llama_json();
  run.settings = std::move(settings);
  run.options = std::move(options);
  Trained trained{run_tiny(folder, run), {}};
  for (const auto& [name, bytes] : trained.result.files) {
    const io::SafetensorsFile file(trained.result.summary.checkpoint / name);
    for (const io::TensorInfo& tensor : file.tensors()) {
      const auto data = file.data(tensor);
      trained.tensors[tensor.name] = std::string(reinterpret_cast<const char*>(data.data()), data.size());
    }
  }
  return trained;
}

Trained fresh(const std::vector<std::string>& settings, exec::RunOptions options = {}) {
  const TempFolder folder;
  return run_in(folder.path(), settings, std::move(options));
}

bool is_frozen(const std::string& name) {
  return name.starts_with("model.embed_tokens") || name.starts_with("model.layers.1.") ||
         name.find("up_proj") != std::string::npos;
}

}  // namespace

TEST_CASE("frozen tensors keep their bits and have no moments, all others train") {
  const Trained two = fresh({kGroups, "train.steps=2", "optimizer.schedule.warmup=0"});
  const Trained six = fresh({kGroups, "train.steps=6", "optimizer.schedule.warmup=0"});
  int kept = 0, moved = 0;
  for (const auto& [name, bytes] : two.tensors) {
    INFO(name);
    const bool same = six.tensors.at(name) == bytes;
    CHECK(same == is_frozen(name));
    ++(same ? kept : moved);
    if (is_frozen(name) && name.find(".exp_avg") != std::string::npos) CHECK(bytes == std::string(bytes.size(), '\0'));
  }
  CHECK((kept > 10 && moved > 10));
}

TEST_CASE("the gradient of a frozen tensor counts neither in the norm nor as an overflow") {
  exec::RunOptions options;
  options.gradient_faults = {{2, 2, std::numeric_limits<float>::infinity()}, {3, 0, 1024}};  // layer 1, embedding
  const Trained faulty = fresh({kGroups}, options), clean = fresh({kGroups});
  CHECK(faulty.result.summary.skipped_steps == 0);
  CHECK(faulty.result.norms == clean.result.norms);
  CHECK(faulty.tensors == clean.tensors);
  CHECK(fresh({}).result.norms[0] > clean.result.norms[0]);
}

TEST_CASE("no policy, placement or precision changes a bit of a run with groups") {
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    const auto with = [precision](const char* policy, const char* placement) {
      return fresh({kGroups, "train.grad_clip=0.8", "train.steps=8", std::string("train.precision=") + precision,
                    std::string("optimizer.policy=") + policy, std::string("optimizer.placement=") + placement});
    };
    const Trained sync = with("sync", "cpu");
    for (const char* policy : {"overlap", "hybrid", "deferred"}) {
      for (const char* placement : {"cpu", "device", "resident"}) {
        INFO(precision << " " << policy << " " << placement);
        const Trained other = with(policy, placement);
        CHECK((other.result.losses == sync.result.losses && other.result.norms == sync.result.norms));
        CHECK(other.tensors == sync.tensors);
      }
    }
  }
}

TEST_CASE("a run with groups resumes to the bit, and with other groups only where that is permitted") {
  const std::vector<std::string> settings = {kGroups, "train.precision=bf16", "optimizer.policy=overlap"};
  const Trained straight = fresh(settings);
  const TempFolder folder;
  exec::RunOptions until, after;
  until.stop_after = 3;
  after.resume = true;
  const Trained half = run_in(folder.path(), settings, until);
  std::vector<std::string> others = settings;
  others[0] = "optimizer.groups=[{pattern: lm_head.weight, frozen: true}]";
  CHECK_THROWS_WITH(run_in(folder.path(), others, after), Catch::Contains("optimizer.groups: model.embed_tokens.weight frozen; "
                                                                          "model.layers.1.* frozen;") &&
                                                              Catch::Contains(" -> lm_head.weight frozen"));
  {
    const TempFolder copy;
    std::filesystem::copy(folder.path(), copy.path(), std::filesystem::copy_options::recursive);
    others.push_back("checkpoint.dir=" + (copy.path() / "run").string());
    exec::RunOptions allowed = after;
    allowed.allow_changes = {"optimizer.groups"};
    const Trained changed = run_in(copy.path(), others, allowed);
    for (const char* name : {"lm_head.weight", "lm_head.weight.exp_avg"}) {  // frozen now: as it was
      CHECK(changed.tensors.at(name) == half.tensors.at(name));
    }
    const char* thawed = "model.embed_tokens.weight";
    CHECK(changed.tensors.at(thawed) != half.tensors.at(thawed));
  }
  CHECK(run_in(folder.path(), settings, after).tensors == straight.tensors);
}
