// Barriers, shuffles and votes.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>

#include "tests/emulator/machine.h"

inline void __syncthreads(const std::source_location& at = std::source_location::current()) {
  ::spipe::emulator::Machine::instance().sync_block(at);
}

inline void __syncwarp(unsigned mask = 0xffffffffU, const std::source_location& at = std::source_location::current()) {
  char nothing = 0;
  ::spipe::emulator::Machine::instance().sync_warp(
      "__syncwarp", mask, &nothing, [](::spipe::emulator::WarpData&) {}, true, at);
}

namespace spipe::emulator {

template <typename T>
struct Shuffle {
  T value;
  unsigned from;  // lane
  bool from_outside = false, keeps_own = false;
};

template <typename T>
T shuffle(const char* name, unsigned mask, T value, unsigned from, bool keeps_own, const std::source_location& at) {
  Shuffle<T> own{value, from, false, keeps_own};
  Machine& machine = Machine::instance();
  machine.sync_warp(
      name, mask, &own,
      [](WarpData& data) {
        T results[kWarp] = {};
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          auto* one = static_cast<Shuffle<T>*>(data.lane[lane]);
          if (one == nullptr) continue;
          const auto* source = one->keeps_own ? one : static_cast<Shuffle<T>*>(data.lane[one->from % kWarp]);
          if (source == nullptr) {
            one->from_outside = true;
          } else {
            results[lane] = source->value;
          }
        }
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          if (data.lane[lane] != nullptr) static_cast<Shuffle<T>*>(data.lane[lane])->value = results[lane];
        }
      },
      false, at);
  if (own.from_outside) machine.fault(name, ": takes the value of a lane that is not in the mask");
  return own.value;
}

struct Vote {
  bool predicate;
  unsigned ballot;
};
inline unsigned vote(const char* name, unsigned mask, bool predicate, const std::source_location& at) {
  Vote own{predicate, 0};
  Machine::instance().sync_warp(
      name, mask, &own,
      [](WarpData& data) {
        unsigned ballot = 0;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          const auto* one = static_cast<Vote*>(data.lane[lane]);
          if (one != nullptr && one->predicate) ballot |= 1U << lane;
        }
        for (void* one : data.lane) {
          if (one != nullptr) static_cast<Vote*>(one)->ballot = ballot;
        }
      },
      false, at);
  return own.ballot;
}

}  // namespace spipe::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32,
              const std::source_location& at = std::source_location::current()) {
  const unsigned lane = ::spipe::emulator::Machine::instance().lane();
  const unsigned w = static_cast<unsigned>(width);
  return ::spipe::emulator::shuffle("__shfl_sync", mask, value, lane / w * w + static_cast<unsigned>(from) % w, false, at);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  const std::source_location& at = std::source_location::current()) {
  const unsigned lane = ::spipe::emulator::Machine::instance().lane();
  const unsigned from = lane ^ static_cast<unsigned>(lanes), w = static_cast<unsigned>(width);
  return ::spipe::emulator::shuffle("__shfl_xor_sync", mask, value, from, from / w > lane / w, at);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                   const std::source_location& at = std::source_location::current()) {
  const unsigned lane = ::spipe::emulator::Machine::instance().lane(), w = static_cast<unsigned>(width);
  return ::spipe::emulator::shuffle("__shfl_down_sync", mask, value, lane + lanes, lane % w + lanes >= w, at);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                 const std::source_location& at = std::source_location::current()) {
  const unsigned lane = ::spipe::emulator::Machine::instance().lane(), w = static_cast<unsigned>(width);
  return ::spipe::emulator::shuffle("__shfl_up_sync", mask, value, lane - lanes, lane % w < lanes, at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, const std::source_location& at = std::source_location::current()) {
  return ::spipe::emulator::vote("__ballot_sync", mask, predicate != 0, at);
}
inline int __any_sync(unsigned mask, int predicate, const std::source_location& at = std::source_location::current()) {
  return ::spipe::emulator::vote("__any_sync", mask, predicate != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const std::source_location& at = std::source_location::current()) {
  return ::spipe::emulator::vote("__all_sync", mask, predicate == 0, at) == 0;
}
