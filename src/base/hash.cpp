#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "spipe/base/error.h"
#include "spipe/base/file.h"

namespace spipe {

std::uint64_t hash64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint64_t hash64_file(const Path& path) {
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(std::string("cannot open: ") + std::strerror(errno), path.string());
  const Closer closer{fd};
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  SPIPE_CHECK(state != nullptr && XXH3_64bits_reset(state.get()) == XXH_OK, "xxhash state");
  std::vector<char> buffer(std::size_t{1} << 20);
  for (;;) {
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    if (got == 0) break;
    if (got < 0) {
      if (errno == EINTR) continue;
      throw Error(std::string("cannot read: ") + std::strerror(errno), path.string());
    }
    XXH3_64bits_update(state.get(), buffer.data(), static_cast<std::size_t>(got));
  }
  return XXH3_64bits_digest(state.get());
}

std::string hash_text(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace spipe
