// Finding, judging and removing checkpoints. Only folders named step-<digits> that are no links are looked at; the order is
// that of the steps in the manifests, never of names or times.
#include <algorithm>
#include <mutex>
#include <set>

#include "checkpoint_files.h"
#include "spipe/base/error.h"
#include "spipe/base/log.h"
#include "spipe/io/checkpoint.h"

namespace spipe::io {
namespace {

std::mutex verified_mutex;
std::set<Path>& verified_folders() {
  static std::set<Path> folders;
  return folders;
}

void unmark(const Path& folder) {
  const std::scoped_lock lock(verified_mutex);
  verified_folders().erase(folder);
}

bool is_marked(const Path& folder) {
  const std::scoped_lock lock(verified_mutex);
  return verified_folders().contains(folder);
}

void note(std::vector<std::string>* skipped, const std::string& line) {
  if (skipped != nullptr) skipped->push_back(line);
}

// Names in a folder, sorted; nothing when there is no such folder.
std::vector<std::string> names_in(const Path& folder) {
  std::vector<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) {
    names.push_back(at->path().filename().string());
  }
  if (failed && std::filesystem::exists(folder)) throw Error("cannot list the folder: " + failed.message(), folder.string());
  std::sort(names.begin(), names.end());
  return names;
}

bool is_real_folder(const Path& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(std::filesystem::symlink_status(path, ignored));
}

// Throws Error with the first file that is not as the manifest says.
void check_files(const Path& folder, const Manifest& manifest, bool hashes) {
  const std::string where = folder.filename().string();
  for (const auto& [name, entry] : manifest.files) {
    const Path path = folder / name;
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(path, ignored)) throw Error(name + " missing", where);
    if (const std::uint64_t bytes = spipe::file_size(path); bytes != entry.bytes) {
      throw Error(name + ": expected " + std::to_string(entry.bytes) + " bytes, file has " + std::to_string(bytes), where);
    }
    if (hashes && hash64_file(path) != entry.hash) throw Error(name + ": its bytes have changed (xxh3 differs)", where);
  }
}

// What `latest` names, or nothing.
std::string latest_name(const Path& run_folder) {
  std::error_code ignored;
  const Path path = run_folder / kLatestFile;
  if (!std::filesystem::is_regular_file(path, ignored)) return {};
  std::string text = read_text(path);
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

// First renamed, so that a half-removed checkpoint is never taken for one.
void remove_checkpoint(const Path& run_folder, const std::string& name) {
  const Path doomed = run_folder / (kTemporaryPrefix + ("old-" + name));
  std::error_code failed;
  std::filesystem::rename(run_folder / name, doomed, failed);
  if (!failed) std::filesystem::remove_all(doomed, failed);
  if (failed) log_warning("cannot remove the old checkpoint " + (run_folder / name).string() + ": " + failed.message());
}

// Whether all bytes are as the manifest says; the answer "yes" is remembered.
bool is_verified(const Path& folder, std::vector<std::string>* skipped) {
  if (is_marked(folder)) return true;
  try {
    check_files(folder, read_manifest(folder), true);
  } catch (const Error& error) {
    note(skipped, error.what());
    return false;
  }
  mark_verified(folder);
  return true;
}

}  // namespace

void mark_verified(const Path& folder) {
  const std::scoped_lock lock(verified_mutex);
  verified_folders().insert(folder);
}

std::vector<CheckpointInfo> list_checkpoints(const Path& run_folder, std::vector<std::string>* skipped) {
  std::vector<CheckpointInfo> found;
  for (const std::string& name : names_in(run_folder)) {
    const Path folder = run_folder / name;
    if (!is_step_name(name) || !is_real_folder(folder)) continue;
    try {
      const Manifest manifest = read_manifest(folder);
      check_files(folder, manifest, false);
      found.push_back({manifest.step, folder});
    } catch (const Error& error) {
      note(skipped, error.what());
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  const std::string latest = latest_name(run_folder);
  if (!latest.empty() && !is_real_folder(run_folder / latest))
    note(skipped, "latest names '" + latest + "', which is not there");
  return found;
}

std::optional<CheckpointInfo> newest_checkpoint(const Path& run_folder, std::vector<std::string>* skipped) {
  std::vector<CheckpointInfo> found = list_checkpoints(run_folder, skipped);
  for (; !found.empty(); found.pop_back()) {
    unmark(found.back().path);  // what was right when it was written may have changed on the disk since
    if (is_verified(found.back().path, skipped)) return found.back();
  }
  return std::nullopt;
}

void prune_checkpoints(const Path& run_folder, int keep) {
  SPIPE_CHECK(keep >= 1, "at least one checkpoint is kept");
  for (const std::string& name : names_in(run_folder)) {
    std::error_code failed;
    if (!name.starts_with(kTemporaryPrefix) || !is_real_folder(run_folder / name)) continue;
    std::filesystem::remove_all(run_folder / name, failed);
    if (failed) log_warning("cannot remove the leftover " + (run_folder / name).string() + ": " + failed.message());
  }
  const std::vector<CheckpointInfo> found = list_checkpoints(run_folder);
  if (found.size() <= static_cast<std::size_t>(keep)) return;
  // The newest one may be damaged; the newest good one is never removed.
  const auto good = std::find_if(found.rbegin(), found.rend(), [](const auto& c) { return is_verified(c.path, nullptr); });
  if (good == found.rend()) return;
  const std::string latest = latest_name(run_folder);
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < found.size(); ++i) {
    const std::string name = found[i].path.filename().string();
    if (name != latest && found[i].path != good->path) remove_checkpoint(run_folder, name);
  }
}

}  // namespace spipe::io
