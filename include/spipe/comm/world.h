// The ranks of a job: who they are, where they run, how they talk and how they end together (DESIGN sections 5 and 11).
// One comm thread per rank makes every MPI call; a rank without a launcher, or alone, never initialises MPI. A watch thread
// notices the death of a rank of this machine or of the launcher and ends the process; the first cause is printed last.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spipe/base/counter.h"
#include "spipe/base/error.h"
#include "spipe/comm/launch.h"

namespace spipe::comm {

// Something that has to be reached first.
struct After {
  const Counter* counter = nullptr;
  std::uint64_t value = 0;
};

// One send or receive of a byte range. The k-th send to a peer with a tag meets the k-th receive there from this rank with the
// same tag and size; different (peer, tag) pairs never wait for each other.
struct Message {
  int peer = -1;  // another rank
  std::uint64_t tag = 0;
  std::span<std::byte> bytes;  // untouched by others from when all of `after` is reached to `done`
  // Sends: where the bytes begin, asked once all of `after` is reached; then only the size of `bytes` counts. Any thread.
  std::function<std::byte*()> where;
  std::vector<After> after;  // the bytes may be read (send) or written (receive) once all are reached
  Counter* done = nullptr;   // signalled with done_value when the bytes are sent or have arrived
  std::uint64_t done_value = 0;
};

struct Traffic {
  std::uint64_t sent_messages = 0, sent_bytes = 0, received_messages = 0, received_bytes = 0;
};

class World {
 public:
  // Collective over all ranks. Throws Error when the environment is contradictory; a rank that does not join is named by a
  // warning every 30 s.
  World();
  explicit World(const LaunchFacts& facts);
  // An orderly end needs finish() before; otherwise the whole job ends as failed.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  // Hosts are numbered by their lowest rank; ranks of a host ascend. Fake hosts count as hosts here.
  [[nodiscard]] int host() const { return host_of(rank()); }
  [[nodiscard]] int hosts() const;
  [[nodiscard]] int host_of(int rank) const;
  [[nodiscard]] const std::vector<int>& ranks_of_host(int host) const;
  [[nodiscard]] int local_rank() const;  // among the ranks of the host
  [[nodiscard]] int local_size() const { return static_cast<int>(ranks_of_host(host()).size()); }
  [[nodiscard]] int pid_of(int rank) const;
  [[nodiscard]] const std::string& machine_name_of(int rank) const;  // host name, for people
  // This rank's threads among all ranks of the machine.
  [[nodiscard]] ThreadShare threads(std::optional<int> asked = std::nullopt) const;

  // Collective calls, one at a time, in the same order on every rank.
  void barrier();
  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes);  // by rank
  void broadcast(std::vector<std::byte>& bytes, int root);                                         // resizes on the others

  // Return at once; the comm thread does the rest. Any thread may call.
  void send(const Message& message);
  void receive(const Message& message);
  [[nodiscard]] Traffic traffic() const;

  // Non-zero once the job is ending because of a failure: to stop waits on Counters (Counter::wait).
  [[nodiscard]] const std::atomic<std::uint32_t>* stop() const;
  // Ends every rank of the job. The first failure of the job is printed as its last line and gives the exit code; later ones
  // are silent. Any thread may call.
  [[noreturn]] void fail(const std::string& cause, ExitCode code);
  // Collective: an orderly end. After it, this rank may leave at any time without being missed.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spipe::comm
