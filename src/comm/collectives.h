// Collective calls on the comm thread, as non-blocking MPI calls so that messages and aborts keep moving.
#pragma once

#include <span>
#include <vector>

#include "transport.h"

namespace spipe::comm {

void barrier(Transport& transport);
[[nodiscard]] std::vector<std::vector<std::byte>> all_gather(Transport& transport, int ranks, std::span<const std::byte> bytes);
void broadcast(Transport& transport, std::vector<std::byte>& bytes, int root);

}  // namespace spipe::comm
