// How units are updated: bytes that an update moves, and which units speculate, go to the device or stay there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spipe/model/shape.h"
#include "spipe/plan/plan.h"

namespace spipe::plan {

// Bytes of an element in the store, and what updates move of them.
struct UpdateBytes {
  std::uint64_t compute = 4, grad = 4;  // what devices fetch, and what they offload
  std::uint64_t state = 12;             // master and moments; the master may be the compute copy or part of it
  bool separate_master = false;         // the compute copy is no part of the state; updates write it and do not read it
  [[nodiscard]] std::uint64_t others() const { return separate_master ? state : state - compute; }  // beside compute and grad
  [[nodiscard]] std::uint64_t slot() const { return compute + others(); }                           // all but the gradient
  [[nodiscard]] std::uint64_t touched() const { return 2 * state + grad; }  // by an update, read and written
  // How many times the bytes of this update AdamW with fp32 master and moments touches: rates of updates are measured with it.
  [[nodiscard]] double of_plain() const { return static_cast<double>(24 + grad) / static_cast<double>(touched()); }
  [[nodiscard]] std::uint64_t in() const { return state + grad; }  // to a device that updates
  [[nodiscard]] std::uint64_t out() const { return slot(); }       // and back
};

// How much of a model is updated in which way: fractions of its parameters, met as nearly as whole units can.
struct UpdateSplit {
  double speculate = 0;  // of what does not stay on the device
  double device = 0;     // of the same
  double resident = 0;   // of all
  bool operator==(const UpdateSplit&) const = default;
};

// The way of every store unit. `home_of_unit` (empty: all at one place) says where each is updated: fractions hold at every
// home, whose processors and links work side by side. Residents are those whose parameters the next step needs first. Of the
// others those speculate whose gradients come first (their updates have most of the backward pass to hide under), and what the
// device updates is spread evenly among the rest.
[[nodiscard]] std::vector<UpdateWay> update_ways(const model::ModelShape& shape, const UpdateSplit& split,
                                                 const std::vector<int>& home_of_unit = {});
// "54 % speculates, 25 % on the device": for people; empty for a split without anything to say.
[[nodiscard]] std::string split_text(const UpdateSplit& split);
// Elements of a piece for updates on the device: an eighth of the largest unit, in blocks of 4,096, 4 Mi at most.
[[nodiscard]] std::uint64_t default_piece_elements(const model::ModelShape& shape);

}  // namespace spipe::plan
