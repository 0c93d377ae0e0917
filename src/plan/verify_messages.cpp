// Messages between ranks: who writes and who reads a mailbox or a wire, on which side of a border between hosts, and that no
// order of arrival blocks (invariant 5); where units are updated (3).
#include <algorithm>
#include <map>

#include "verify_parts.h"

namespace spipe::plan::verification {

namespace {

bool carries(const Buffer& buffer) {
  return buffer.kind == BufferKind::mailbox || buffer.kind == BufferKind::norm_parts || buffer.kind == BufferKind::wire;
}

// Ends of what carries messages.
struct Ends {
  const Task* writer = nullptr;
  std::vector<const Task*> readers;
};

class Messages {
 public:
  explicit Messages(const Subject& subject) : subject_(subject), plan_(subject.plan), ends_(subject.plan.buffers.size()) {}

  Finding run() {
    for (const Task& task : plan_.tasks) {
      if (auto found = note_uses(task)) return found;
    }
    for (const Task& task : plan_.tasks) {
      if (auto found = check_waits(task)) return found;
      if (task.kind == TaskKind::push) {
        if (auto found = check_pair(task)) return found;
      }
      if (task.kind == TaskKind::send || task.kind == TaskKind::pull) {
        if (auto found = check_received(task)) return found;
      }
      if (auto found = check_home(task)) return found;
    }
    return check_norms();
  }

 private:
  StreamKind updates_on(int store_unit) const {
    return plan_.options.way(store_unit).placement == Placement::cpu ? StreamKind::cpu : StreamKind::update;
  }
  int host(const Task& task) const { return plan_.host_of_rank[task.rank]; }

  Finding note_uses(const Task& task) {
    const auto on = [&](StreamKind a, StreamKind b) { return task.stream == a || task.stream == b; };
    const bool placed = task.kind == TaskKind::send                                    ? on(StreamKind::send, StreamKind::d2h)
                        : task.kind == TaskKind::recv                                  ? on(StreamKind::recv, StreamKind::h2d)
                        : task.kind == TaskKind::push || task.kind == TaskKind::pull   ? task.stream == StreamKind::comm
                        : task.kind == TaskKind::load                                  ? task.stream == StreamKind::update_in
                        : task.kind == TaskKind::unload                                ? task.stream == StreamKind::update_out
                        : task.kind == TaskKind::optimize                              ? task.stream == updates_on(task.unit)
                        : task.kind == TaskKind::norm || task.kind == TaskKind::commit ? task.stream == StreamKind::decide
                                                                                       : true;
    if (!placed) return subject_.violation(5, task, "runs on a stream of another purpose");
    for (const Use& use : subject_.uses(task)) {
      const Buffer& buffer = subject_.buffer(use);
      if (!carries(buffer)) continue;
      Ends& ends = ends_[use.buffer];
      if (use.access == Access::read) {
        if (buffer.kind == BufferKind::wire && !ends.readers.empty()) {
          return subject_.violation(5, task, "takes a message that " + subject_.name(*ends.readers[0]) + " has taken");
        }
        ends.readers.push_back(&task);
        continue;
      }
      const bool may_write =
          buffer.kind == BufferKind::wire
              ? task.kind == TaskKind::push
              : task.kind == TaskKind::pull || (task.kind == TaskKind::send && buffer.kind == BufferKind::mailbox);
      if (!may_write) return subject_.violation(5, task, fmt::format("writes a {}", buffer_kind_name(buffer.kind)));
      if (ends.writer != nullptr) {
        return subject_.violation(
            5, task, fmt::format("fills the same {} as {}", buffer_kind_name(buffer.kind), subject_.name(*ends.writer)));
      }
      ends.writer = &task;
    }
    return std::nullopt;
  }

  // Ranks of different hosts have nothing in common to wait at, but messages.
  Finding check_waits(const Task& task) {
    for (const Wait& wait : subject_.waits(task)) {
      const Task& other = plan_.tasks[wait.task];
      if (host(other) == host(task)) continue;
      const bool message = task.kind == TaskKind::pull && task.peer == other.id && !wait.previous_step;
      if (!message) return subject_.violation(5, task, "waits for " + subject_.name(other) + " of another host");
    }
    return std::nullopt;
  }

  // A pull is the next task after its push: then both may be taken as one, and all waits still point back in program order,
  // even if each end waits for the other to be there.
  Finding check_pair(const Task& push) {
    const auto wire = std::find_if(subject_.uses(push).begin(), subject_.uses(push).end(),
                                   [&](const Use& use) { return subject_.buffer(use).kind == BufferKind::wire; });
    if (wire == subject_.uses(push).end()) return subject_.violation(5, push, "puts its message on no wire");
    const Ends& ends = ends_[wire->buffer];
    if (ends.readers.empty()) return subject_.violation(5, push, "sends a message that nobody takes");
    const Task& pull = *ends.readers.front();
    if (pull.kind != TaskKind::pull) return subject_.violation(5, pull, "reads a wire");
    if (pull.id != push.id + 1) {
      return subject_.violation(5, pull,
                                "does not follow " + subject_.name(push) + " directly: their streams may block each other");
    }
    if (push.peer != push.id || pull.peer != push.id || push.peer_rank != pull.rank || pull.peer_rank != push.rank) {
      return subject_.violation(5, pull, "and " + subject_.name(push) + " do not name each other as the other end");
    }
    if (host(push) == host(pull)) return subject_.violation(5, pull, "takes a message from its own host");
    if (push.bytes != pull.bytes) {
      return subject_.violation(5, pull, fmt::format("takes {} bytes of a message of {}", pull.bytes, push.bytes));
    }
    return std::nullopt;
  }

  Finding check_received(const Task& task) {
    for (const Use& use : subject_.uses(task)) {
      if (use.access == Access::read) {
        if (carries(subject_.buffer(use)) && ends_[use.buffer].writer == nullptr) {
          return subject_.violation(5, task, "takes a message that nobody sends");
        }
        continue;
      }
      if (!ends_[use.buffer].readers.empty()) continue;
      return subject_.violation(5, task,
                                fmt::format("fills a {} that nobody reads", buffer_kind_name(subject_.buffer(use).kind)));
    }
    return std::nullopt;
  }

  // What belongs to a unit happens on its home; its save on the first rank of that host, which saves units in ascending order.
  Finding check_home(const Task& task) {
    const bool saves = task.kind == TaskKind::save;
    const bool at_home = task.kind == TaskKind::offload || task.kind == TaskKind::load || task.kind == TaskKind::optimize ||
                         task.kind == TaskKind::unload || task.kind == TaskKind::commit;
    if ((!at_home && !saves) || plan_.ranks == 1) return std::nullopt;
    const int home = plan_.home_of_unit[static_cast<std::size_t>(task.unit)];
    if (!saves) {
      if (home == task.rank) return std::nullopt;
      return subject_.violation(3, task, fmt::format("runs on rank {}, but the home of its unit is rank {}", task.rank, home));
    }
    const auto& hosts = plan_.host_of_rank;
    const auto first = std::find(hosts.begin(), hosts.end(), hosts[static_cast<std::size_t>(home)]) - hosts.begin();
    if (task.rank != first) {
      return subject_.violation(3, task,
                                fmt::format("runs on rank {}, but the first rank of its unit's host is {}", task.rank, first));
    }
    const auto [last, is_first] = last_saved_.try_emplace(task.rank, task.unit);
    if (!is_first && last->second >= task.unit) {
      return subject_.violation(3, task, fmt::format("comes after unit {}: units are saved in ascending order", last->second));
    }
    last->second = task.unit;
    return std::nullopt;
  }

  Finding check_norms() {
    std::vector<const Task*> norms(static_cast<std::size_t>(plan_.hosts()), nullptr);
    for (const Task& task : plan_.tasks) {
      if (task.kind != TaskKind::norm) continue;
      const Task*& own = norms[static_cast<std::size_t>(host(task))];
      if (own != nullptr) return subject_.violation(3, task, "is the second of its host");
      own = &task;
    }
    return std::nullopt;
  }

  const Subject& subject_;
  const Plan& plan_;
  std::vector<Ends> ends_;
  std::map<int, int> last_saved_;  // by rank
};

}  // namespace

Finding check_messages(const Subject& subject) { return Messages(subject).run(); }

}  // namespace spipe::plan::verification
