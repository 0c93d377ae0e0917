#include "environment.h"

#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string_view>
#include <vector>

namespace spipe::comm {
namespace {

const char* get(const char* name) { return std::getenv(name); }

std::vector<std::string> words(std::string_view list) {
  std::vector<std::string> found;
  while (!list.empty()) {
    const std::size_t comma = list.find(',');
    if (comma != 0) found.emplace_back(list.substr(0, comma));
    list = comma == std::string_view::npos ? std::string_view{} : list.substr(comma + 1);
  }
  return found;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

// "vader" is the name up to Open MPI 4, "sm" the one from 5 on.
bool is_shared_memory(const std::string& transport) { return transport == "vader" || transport == "sm"; }

}  // namespace

std::string without_shared_memory(const std::string& chosen) {
  if (chosen.empty()) return "^vader,sm,uct,openib,ofi";  // what Debian excludes by itself would be forgotten otherwise
  std::vector<std::string> kept;
  if (chosen.front() == '^') {
    kept = words(std::string_view(chosen).substr(1));
    std::erase_if(kept, is_shared_memory);
    kept.insert(kept.begin(), {"vader", "sm"});
    return "^" + joined(kept);
  }
  kept = words(chosen);
  const bool shared_only =
      std::erase_if(kept, is_shared_memory) > 0 && (kept.empty() || kept == std::vector<std::string>{"self"});
  if (shared_only) kept.emplace_back("tcp");  // something has to lead from one process to another
  return joined(kept);
}

void prepare_mpi_environment(const LaunchFacts& facts) {
  const char* const transports = get("OMPI_MCA_btl");
  ::setenv("OMPI_MCA_btl", without_shared_memory(transports == nullptr ? "" : transports).c_str(), 1);
  // Its other backings are probed with names in /dev/shm.
  ::setenv("OMPI_MCA_shmem", "mmap", 0);
  // UCX, where it is used, has a shared memory of its own.
  ::setenv("UCX_TLS", "^sm", 0);
  const bool one_machine = facts.local_size == facts.size;
  const bool interface_chosen = get("OMPI_MCA_btl_tcp_if_include") != nullptr || get("OMPI_MCA_btl_tcp_if_exclude") != nullptr;
  if (one_machine && !interface_chosen) ::setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.1/8", 1);
}

std::string session_folder(const Environment& environment, int launcher_pid) {
  const char* const text = environment("PMIX_SERVER_TMPDIR");
  if (text == nullptr) return {};
  const std::filesystem::path folder(text);
  const bool ours = folder.is_absolute() && folder.filename() == fmt::format("pid.{}", launcher_pid) &&
                    folder.parent_path().filename().string().starts_with("ompi.");
  return ours ? folder.string() : std::string{};
}

}  // namespace spipe::comm
