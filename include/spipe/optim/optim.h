// Optimizer hyperparameters, learning-rate schedules, clipping, and the update of a store unit over its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "spipe/base/thread_pool.h"
#include "spipe/model/shape.h"
#include "spipe/optim/groups.h"
#include "spipe/store/store.h"

namespace spipe::optim {

enum class ScheduleKind : std::uint8_t { constant, linear, cosine, inverse_sqrt, wsd_linear, wsd_sqrt };
[[nodiscard]] ScheduleKind schedule_kind_from_name(const std::string& name);  // Error with "did you mean"

// Formulas: tests/golden/data/README.md, "schedules".
struct LrSchedule {
  ScheduleKind kind = ScheduleKind::cosine;
  double lr = 1e-3;
  double final = 0.1;                             // last value as a fraction of lr
  std::int64_t warmup = 0, total = 0, decay = 0;  // updates; decay: wsd only
  double warmup_offset = 1;                       // lr (s+o)/(w+o) for s < w; 0: the first update has rate 0
  // Rate of update s+1 (s updates done), in double; finite and >= 0 for every s >= 0.
  [[nodiscard]] double at(std::int64_t updates_done) const;
};

// The rules' formulas: kernels/ops.h. Adam and SGD add weight_decay * p to the gradient, AdamW and Lion shrink p by lr *
// weight_decay.
struct Hyper {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;  // SGD has no betas; eps is Adam's and AdamW's
  std::vector<ParameterGroup> groups;
  UpdateRule rule = UpdateRule::adamw;
  double momentum = 0.9;  // SGD's
};
// adamw, adam, sgd (with nesterov: sgd_nesterov), lion.
[[nodiscard]] UpdateRule rule_from_name(const std::string& name, bool nesterov);
// What a store keeps for a rule. `moment`: fp32 or bf16. `split`: the master as bf16 compute copy and 16 low bits.
[[nodiscard]] store::StoreFormat format_for(UpdateRule rule, DType compute, DType moment, bool split);

// clip = min(1, c / (norm + 1e-6)) in double; c <= 0 means no clipping (1).
[[nodiscard]] double clip_factor(double norm, double max_norm);

// The norm of the step from the per-tensor 4,096-element block sums: blocks ascending within a tensor, tensors by name within
// their unit, units ascending, each level into a sum of its own.
struct GradientNorm {
  double norm = 0;
  bool finite = true;
  int first_bad_unit = -1;  // store unit whose gradient had the first non-finite value
};

// Block sums of every store unit; offload tasks fill them, norm reads them. A unit's sums and its flag lie together, so that a
// host can hand them over as one piece.
class NormTable {
 public:
  explicit NormTable(const model::ModelShape& shape);
  // In memory that somebody else owns and that outlives the table, zeros at the start: shared by the ranks of a host.
  NormTable(const model::ModelShape& shape, std::span<std::byte> place);
  NormTable(const NormTable&) = delete;
  NormTable& operator=(const NormTable&) = delete;
  [[nodiscard]] static std::uint64_t bytes(const model::ModelShape& shape);  // of the place
  [[nodiscard]] double* blocks(int unit, std::size_t parameter);             // [ceil(elements / kNormBlock)]
  [[nodiscard]] std::uint32_t* nonfinite(int unit);
  [[nodiscard]] std::span<std::byte> part(int unit);  // the flag (8 bytes) and all block sums of a unit
  // `unit_norms`: [units], gets the norm of every unit too; may be empty.
  [[nodiscard]] GradientNorm combine(std::span<double> unit_norms = {}) const;
  [[nodiscard]] double unit_norm(int unit) const;

 private:
  struct Unit {
    std::size_t first = 0, words = 0;  // 8-byte words of its part
    std::vector<std::size_t> blocks;   // per parameter: offset of its first block from `first`
    std::vector<std::size_t> counts;   // per parameter
    std::vector<std::size_t> by_name;  // parameters in name order
  };
  [[nodiscard]] const Unit& at(int unit) const;
  [[nodiscard]] double sum(const Unit& unit) const;
  std::vector<double> own_;
  double* words_ = nullptr;
  std::vector<Unit> units_;
};

// The scalars of one update; t counts updates done including this one (1, 2, ...).
struct UpdateScalars {
  double lr = 0, grad_scale = 1;
  std::int64_t t = 1;
};

// Pointers to element 0 of every plane of a unit: in the store, or (shifted, so that only some elements are there) elsewhere.
// The parameter is the compute plane alone (fp32; no master), a master plane (fp32) with the compute plane as its rounded copy,
// or split between both (bf16 and u16): kernels/ops.h, UpdatePlanes. v is null where the rule has none.
struct UnitPlanes {
  ConstPtr grad;
  Ptr compute, master, m, v;
};
[[nodiscard]] UnitPlanes planes_of(const store::Store& store, int unit, int slot);

// Elements [begin, end) of a unit: state and gradient are read from `from`, state (and the compute copy, where there is one
// beside the master) is written to `to`; the same planes, or planes that do not overlap. The bits do not depend on how a unit
// is cut or on where it lies. Padding between parameters that lies in the range is zero in every plane, and stays so. Of frozen
// parameters nothing is written: `to` holds their values already (copy_frozen).
void update_elements(Ops& ops, const model::StoreUnit& unit, const UnitPlanes& from, const UnitPlanes& to, std::uint64_t begin,
                     std::uint64_t end, const Hyper& hyper, const UpdateScalars& scalars, std::uint32_t* nonfinite_master);

// Frozen parameters from the current slot of their unit to the other one, for units that have two.
void copy_frozen(store::Store& store, const model::ModelShape& shape, std::span<const ParameterGroup> groups);

// One pass over a store unit in place: every parameter in fixed 64 Ki-element blocks, on all threads of host_ops' pool.
// Neighbours of equal settings share a call, with the padding between them (zero in every plane, and it stays zero).
void update_unit(Ops& host_ops, const model::StoreUnit& unit, store::Store& store, int unit_index, const Hyper& hyper,
                 const UpdateScalars& scalars, std::uint32_t* nonfinite_master);

}  // namespace spipe::optim
