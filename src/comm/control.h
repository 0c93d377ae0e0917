// What the ranks of a machine must know of each other to end together: lies in shared memory, no pointers inside.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace spipe::comm {

struct RankState {
  std::atomic<std::uint32_t> finished{0};  // this rank may leave without being missed
  std::atomic<std::uint32_t> silent{0};    // this rank prints nothing any more
};

struct ControlBlock {
  static constexpr std::size_t kCauseBytes = 1000;
  std::atomic<std::uint32_t> stop{0};     // the job is ending; cause and code are valid
  std::atomic<std::uint32_t> claimed{0};  // rank + 1 of whoever names the first cause; kRemote: another machine did
  std::atomic<std::int32_t> code{0};
  std::atomic<std::uint32_t> printed{0};  // the cause was
  std::array<char, kCauseBytes> cause{};

  static constexpr std::uint32_t kRemote = ~std::uint32_t{0};
  // The first caller wins: writes the cause and stops the machine's ranks.
  bool claim(std::uint32_t owner, std::string_view why, int exit_code);
  // As claim, when the owner died between claiming and telling.
  bool claim_after(std::uint32_t dead_owner, std::uint32_t owner, std::string_view why, int exit_code);
  [[nodiscard]] std::string cause_text() const { return cause.data(); }

  // The states of all ranks of the job follow the block (only those of this machine are used).
  [[nodiscard]] RankState& state(int rank) { return reinterpret_cast<RankState*>(this + 1)[rank]; }
  [[nodiscard]] static std::uint64_t bytes(int ranks) {
    return sizeof(ControlBlock) + static_cast<std::uint64_t>(ranks) * sizeof(RankState);
  }

 private:
  void tell(std::string_view why, int exit_code);
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace spipe::comm
