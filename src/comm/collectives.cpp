#include "collectives.h"

#include <algorithm>
#include <climits>
#include <cstdint>

#include "mpi_check.h"
#include "spipe/base/error.h"

namespace spipe::comm {
namespace {

constexpr std::uint64_t kBroadcastPiece = std::uint64_t{64} << 20U;

}  // namespace

void barrier(Transport& transport) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
  transport.complete(request);
}

std::vector<std::vector<std::byte>> all_gather(Transport& transport, int ranks, std::span<const std::byte> bytes) {
  SPIPE_CHECK(bytes.size() <= INT_MAX, "too much for one gather");
  const int own = static_cast<int>(bytes.size());
  std::vector<int> sizes(static_cast<std::size_t>(ranks)), offsets(static_cast<std::size_t>(ranks));
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Iallgather(&own, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD, &request), "MPI_Iallgather");
  transport.complete(request);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    SPIPE_CHECK(total + sizes[i] <= INT_MAX, "too much for one gather");
    offsets[i] = static_cast<int>(total);
    total += sizes[i];
  }
  std::vector<std::byte> all(static_cast<std::size_t>(total));
  check_mpi(MPI_Iallgatherv(bytes.data(), own, MPI_BYTE, all.data(), sizes.data(), offsets.data(), MPI_BYTE, MPI_COMM_WORLD,
                            &request),
            "MPI_Iallgatherv");
  transport.complete(request);
  std::vector<std::vector<std::byte>> parts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto begin = all.begin() + offsets[i];
    parts.emplace_back(begin, begin + sizes[i]);
  }
  return parts;
}

void broadcast(Transport& transport, std::vector<std::byte>& bytes, int root) {
  std::uint64_t size = bytes.size();
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ibcast(&size, 1, MPI_UINT64_T, root, MPI_COMM_WORLD, &request), "MPI_Ibcast");
  transport.complete(request);
  bytes.resize(size);
  for (std::uint64_t at = 0; at < size; at += kBroadcastPiece) {
    const int piece = static_cast<int>(std::min(kBroadcastPiece, size - at));
    check_mpi(MPI_Ibcast(bytes.data() + at, piece, MPI_BYTE, root, MPI_COMM_WORLD, &request), "MPI_Ibcast");
    transport.complete(request);
  }
}

}  // namespace spipe::comm
