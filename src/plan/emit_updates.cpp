#include "emit_updates.h"

#include <algorithm>
#include <utility>

#include "spipe/base/checked.h"

namespace spipe::plan {

namespace {
constexpr std::uint64_t kPieceAlignment = 256;  // elements: planes of a piece start aligned whatever their type
}

Updates::Updates(Builder& builder, const model::ModelShape& shape, const ScheduleOptions& options, const UpdateBytes& bytes,
                 Emitter emitter)
    : builder_(builder),
      shape_(shape),
      options_(options),
      bytes_(bytes),
      emitter_(std::move(emitter)),
      residents_(shape.store_units.size(), kNone),
      on_device_(static_cast<std::size_t>(options.ranks)) {
  SPIPE_CHECK(options.updates.empty() || options.updates.size() == shape.store_units.size(), "every unit has its way");
  SPIPE_CHECK(options.piece_elements > 0 && options.piece_elements % 4096 == 0, "pieces are whole blocks");
}

void Updates::add_residents() {
  for (int s = 0; s < shape_.store_unit_count(); ++s) {
    if (elements(s) == 0 || way(s).placement != Placement::resident) continue;
    SPIPE_CHECK(!way(s).speculate, "resident units do not speculate");
    residents_[static_cast<std::size_t>(s)] =
        builder_.buffer({.kind = BufferKind::resident_state,
                         .rank = narrow<std::uint16_t>(emitter_.home(s)),
                         .unit = s,
                         .bytes = checked_mul(round_up(elements(s), kPieceAlignment), bytes_.state)});
  }
}

void Updates::offloaded(int s) {
  if (way(s).speculate) emit(s);
}

void Updates::finish(const std::vector<std::uint32_t>& norm_values) {
  norm_values_ = &norm_values;
  const std::vector<int> order = in_forward_order();
  for (const int s : order) {
    if (!way(s).speculate) emit(s);
  }
  for (int rank = 0; rank < options_.ranks; ++rank) drain(rank, 0);
  for (const int s : order) emit_commit(s);
}

std::vector<int> Updates::in_forward_order() const {
  std::vector<int> order;
  for (const model::ComputeUnit& unit : shape_.units) {
    for (const int s : unit.store_units) {
      if (elements(s) > 0 && std::find(order.begin(), order.end(), s) == order.end()) order.push_back(s);
    }
  }
  return order;
}

void Updates::emit(int s) {
  if (way(s).placement == Placement::cpu) {
    emit_on_cpu(s);
  } else {
    emit_on_device(s);
  }
}

// What is not speculative knows the norm.
void Updates::add_norm(std::vector<Use>& uses, int s) const {
  if (way(s).speculate) return;
  uses.push_back({(*norm_values_)[static_cast<std::size_t>(emitter_.host(emitter_.home(s)))], Access::read});
}

void Updates::emit_on_cpu(int s) {
  std::vector<Use> uses;
  add_norm(uses, s);
  uses.push_back({emitter_.stored(BufferKind::store_grad, s), Access::read});
  const bool out_of_place = way(s).slots() == 2;
  const Access access = out_of_place ? Access::read : Access::update;
  uses.push_back({emitter_.stored(BufferKind::store_state, s), access});
  uses.push_back({emitter_.stored(BufferKind::store_compute, s), access});
  if (out_of_place) uses.push_back({emitter_.stored(BufferKind::store_shadow, s), Access::write});
  emitter_.task(emitter_.home(s),
                {.kind = TaskKind::optimize,
                 .stream = StreamKind::cpu,
                 .unit = s,
                 .flags = flags(s),
                 .bytes = elements(s) * bytes_.touched()},
                uses);
}

std::uint64_t Updates::piece_length(int s, std::uint16_t number) const {
  return std::min(options_.piece_elements, elements(s) - number * options_.piece_elements);
}

void Updates::emit_on_device(int s) {
  const int rank = emitter_.home(s);
  const auto pieces = narrow<std::uint16_t>(ceil_div(elements(s), options_.piece_elements));
  for (std::uint16_t i = 0; i < pieces; ++i) {
    const bool resident = way(s).placement == Placement::resident;
    const std::uint64_t each = resident ? bytes_.grad + bytes_.compute : bytes_.grad + bytes_.slot();
    Piece piece{.unit = s, .number = i};
    piece.buffer = builder_.buffer({.kind = BufferKind::state_piece,
                                    .rank = narrow<std::uint16_t>(rank),
                                    .unit = s,
                                    .bytes = round_up(piece_length(s, i), kPieceAlignment) * each});
    emit_load(piece);
    on_device_[static_cast<std::size_t>(rank)].push_back(piece);
    drain(rank, kPiecesOnDevice - 1);
  }
}

void Updates::drain(int rank, std::size_t most) {
  auto& pieces = on_device_[static_cast<std::size_t>(rank)];
  while (pieces.size() > most) {
    emit_rest(pieces.front());
    pieces.pop_front();
  }
}

void Updates::emit_load(const Piece& piece) {
  const int s = piece.unit;
  const bool resident = way(s).placement == Placement::resident;
  std::vector<Use> uses;
  add_norm(uses, s);
  uses.push_back({emitter_.stored(BufferKind::store_grad, s), Access::read});
  if (!resident) {
    uses.push_back({emitter_.stored(BufferKind::store_state, s), Access::read});
    if (!bytes_.separate_master) uses.push_back({emitter_.stored(BufferKind::store_compute, s), Access::read});
  }
  uses.push_back({piece.buffer, Access::write});
  emitter_.task(emitter_.home(s),
                {.kind = TaskKind::load,
                 .stream = StreamKind::update_in,
                 .unit = s,
                 .flags = flags(s),
                 .bytes = piece_length(s, piece.number) * (resident ? bytes_.grad : bytes_.in()),
                 .piece = piece.number},
                uses);
}

void Updates::emit_rest(const Piece& piece) {
  const int s = piece.unit, rank = emitter_.home(s);
  const bool resident = way(s).placement == Placement::resident;
  std::vector<Use> uses;
  add_norm(uses, s);
  uses.push_back({piece.buffer, Access::update});
  if (resident) uses.push_back({residents_[static_cast<std::size_t>(s)], Access::update});
  const std::uint64_t length = piece_length(s, piece.number);
  emitter_.task(rank,
                {.kind = TaskKind::optimize,
                 .stream = StreamKind::update,
                 .unit = s,
                 .flags = flags(s),
                 .bytes = length * bytes_.touched(),
                 .piece = piece.number},
                uses);
  const BufferKind target = resident ? BufferKind::store_compute : BufferKind::store_shadow;
  // The first piece of a slot overwrites whatever was there; of parameters in place the rest stays.
  const bool whole = !resident && piece.number == 0;
  emitter_.task(rank,
                {.kind = TaskKind::unload,
                 .stream = StreamKind::update_out,
                 .unit = s,
                 .flags = flags(s),
                 .bytes = length * (resident ? bytes_.compute : bytes_.out()),
                 .piece = piece.number},
                {{piece.buffer, Access::read}, {emitter_.stored(target, s), whole ? Access::write : Access::update}});
}

void Updates::emit_commit(int s) {
  std::vector<Use> uses;
  const bool speculates = way(s).speculate;
  if (speculates) {
    uses.push_back({(*norm_values_)[static_cast<std::size_t>(emitter_.host(emitter_.home(s)))], Access::read});
    uses.push_back({emitter_.stored(BufferKind::store_grad, s), Access::read});
  }
  if (way(s).slots() == 2) {
    uses.push_back({emitter_.stored(BufferKind::store_state, s), Access::update});
    uses.push_back({emitter_.stored(BufferKind::store_shadow, s), Access::update});
  }
  uses.push_back({emitter_.stored(BufferKind::store_compute, s), Access::update});
  emitter_.task(emitter_.home(s), {.kind = TaskKind::commit, .stream = StreamKind::decide, .unit = s, .flags = flags(s)}, uses);
}

}  // namespace spipe::plan
