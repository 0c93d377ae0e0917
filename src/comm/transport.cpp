#include "transport.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <type_traits>

#include "mpi_check.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"

namespace spipe::comm {
namespace {

constexpr int kControlTag = 1;
constexpr int kDataTag = 16;  // + slot

bool ready(const Message& message) {
  return std::ranges::all_of(message.after, [](const After& after) { return after.counter->reached(after.value); });
}

std::uint64_t pieces_of(const Message& message) {
  return std::max<std::uint64_t>(1, ceil_div(message.bytes.size(), Transport::kPieceBytes));  // an empty message is one piece
}

std::span<std::byte> piece_of(const Message& message, std::uint64_t piece) {
  const std::uint64_t begin = piece * Transport::kPieceBytes;
  return message.bytes.subspan(begin, std::min<std::uint64_t>(Transport::kPieceBytes, message.bytes.size() - begin));
}

}  // namespace

enum class ControlKind : std::uint32_t { announce, grant, abort };

struct Transport::Control {
  ControlKind kind = ControlKind::announce;
  std::int32_t number = 0;  // grant: the slot; abort: the exit code
  std::uint64_t tag = 0, bytes = 0, id = 0;
  char cause[480] = {};
};

struct Transport::Sending {
  Message message;
  std::uint64_t id = 0;
  int slot = -1;
  std::uint64_t next_piece = 0, finished_pieces = 0;
};

struct Transport::Receiving {
  Message message;
  int slot = -1;
  std::uint64_t next_piece = 0, finished_pieces = 0;
};

struct Transport::Request {
  Sending* sending = nullptr;
  Receiving* receiving = nullptr;
  std::shared_ptr<Control> control;  // keeps a control message until it is sent
};

Transport::Transport(AbortHandler on_abort) : on_abort_(std::move(on_abort)) {}
Transport::~Transport() = default;

void Transport::submit(const Message& message, bool is_send) {
  SPIPE_CHECK(message.peer >= 0, "a message needs a peer");
  {
    const std::lock_guard<std::mutex> guard(lock_);
    submitted_.emplace_back(message, is_send);
  }
  poke();
}

void Transport::poke() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    poked_ = true;
  }
  wake_.notify_one();
}

Traffic Transport::traffic() const {
  return {.sent_messages = sent_messages_.load(),
          .sent_bytes = sent_bytes_.load(),
          .received_messages = received_messages_.load(),
          .received_bytes = received_bytes_.load()};
}

void Transport::tell_abort(const std::vector<int>& ranks, const std::string& cause, int code,
                           std::chrono::milliseconds patience) {
  if (ranks.empty()) return;
  std::unique_lock<std::mutex> guard(lock_);
  for (const int rank : ranks) {
    auto control = std::make_unique<Control>();
    control->kind = ControlKind::abort;
    control->number = code;
    std::copy_n(cause.data(), std::min(cause.size(), sizeof(control->cause) - 1), control->cause);
    to_tell_.emplace_back(rank, std::move(control));
    telling_.fetch_add(1);
  }
  poked_ = true;
  wake_.notify_one();
  told_.wait_for(guard, patience, [&] { return telling_.load() == 0; });
}

void Transport::start() {
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  control_buffers_ = std::make_unique<Control[]>(kControlReceives);
  control_requests_.assign(kControlReceives, MPI_REQUEST_NULL);
  for (int i = 0; i < kControlReceives; ++i) post_control_receive(i);
}

void Transport::stop() {
  SPIPE_CHECK(!waiting() && requests_.empty(), "messages are left at the end of the job");
  for (MPI_Request& request : control_requests_) {
    check_mpi(MPI_Cancel(&request), "MPI_Cancel");
    check_mpi(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait");
  }
  control_requests_.clear();
}

bool Transport::waiting() const {
  return !unannounced_.empty() || !announced_.empty() || !granted_.empty() || !expected_.empty() || !announcements_.empty() ||
         !receivings_.empty();
}

bool Transport::progress() {
  bool moved = take_submissions();
  moved |= take_control_messages();
  moved |= announce_ready_sends();
  moved |= match_receives();
  moved |= grant_ready_receives();
  moved |= send_pieces();
  moved |= take_finished_requests();
  return moved;
}

void Transport::nap(bool moved) {
  using std::chrono::microseconds;
  idle_rounds_ = moved ? 0 : idle_rounds_ + 1;
  if (moved) return;
  microseconds length{20};
  if (requests_.empty()) {
    length = microseconds(waiting() ? std::min(200, 50 + idle_rounds_) : std::min(1000, 100 + idle_rounds_ / 4));
  } else if (idle_rounds_ > 100) {
    length = microseconds(100);
  }
  std::unique_lock<std::mutex> guard(lock_);
  wake_.wait_for(guard, length, [&] { return poked_; });
  poked_ = false;
}

void Transport::complete(MPI_Request request) {
  for (;;) {
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return;
    nap(progress());
  }
}

bool Transport::take_submissions() {
  std::vector<std::pair<Message, bool>> messages;
  std::vector<std::pair<int, std::unique_ptr<Control>>> to_tell;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    messages.swap(submitted_);
    to_tell.swap(to_tell_);
  }
  for (const auto& [rank, control] : to_tell) send_control(rank, *control);
  for (const auto& [message, is_send] : messages) {
    SPIPE_CHECK(message.peer != rank_, "a rank does not send to itself");
    const Key key{message.peer, message.tag};
    if (is_send) {
      auto sending = std::make_unique<Sending>();
      sending->message = message;
      sending->id = next_id_++;
      unannounced_[key].push_back(std::move(sending));
    } else {
      auto receiving = std::make_unique<Receiving>();
      receiving->message = message;
      expected_[key].push_back(std::move(receiving));
    }
  }
  return !messages.empty() || !to_tell.empty();
}

bool Transport::announce_ready_sends() {
  bool moved = false;
  for (auto at = unannounced_.begin(); at != unannounced_.end();) {
    auto& queue = at->second;
    while (!queue.empty() && ready(queue.front()->message)) {
      std::unique_ptr<Sending> sending = std::move(queue.front());
      queue.pop_front();
      Message& message = sending->message;
      if (message.where) message.bytes = {message.where(), message.bytes.size()};
      Control control;
      control.kind = ControlKind::announce;
      control.tag = sending->message.tag;
      control.bytes = sending->message.bytes.size();
      control.id = sending->id;
      send_control(sending->message.peer, control);
      announced_.emplace(sending->id, std::move(sending));
      moved = true;
    }
    at = queue.empty() ? unannounced_.erase(at) : std::next(at);
  }
  return moved;
}

bool Transport::match_receives() {
  bool moved = false;
  for (auto at = announcements_.begin(); at != announcements_.end();) {
    auto& queue = at->second;
    const auto expected = expected_.find(at->first);
    while (!queue.empty() && expected != expected_.end() && !expected->second.empty()) {
      std::unique_ptr<Receiving> receiving = std::move(expected->second.front());
      expected->second.pop_front();
      SPIPE_CHECK(queue.front().bytes == receiving->message.bytes.size(),
                  fmt::format("rank {} sends {} bytes with tag {}, rank {} expects {}", at->first.first, queue.front().bytes,
                              at->first.second, rank_, receiving->message.bytes.size()));
      matched_.push_back({receiving.get(), queue.front().id});
      receivings_.push_back(std::move(receiving));
      queue.pop_front();
      moved = true;
    }
    if (expected != expected_.end() && expected->second.empty()) expected_.erase(expected);
    at = queue.empty() ? announcements_.erase(at) : std::next(at);
  }
  return moved;
}

bool Transport::grant_ready_receives() {
  bool moved = false;
  for (auto at = matched_.begin(); at != matched_.end();) {
    Receiving& receiving = *at->receiving;
    std::vector<bool>& slots = slots_[receiving.message.peer];
    slots.resize(kOpenTransfers);
    const auto free_slot = std::ranges::find(slots, false);
    if (free_slot == slots.end() || !ready(receiving.message)) {
      ++at;
      continue;
    }
    *free_slot = true;
    receiving.slot = static_cast<int>(free_slot - slots.begin());
    for (int i = 0; i < kPiecesInFlight && receiving.next_piece < pieces_of(receiving.message); ++i) {
      post_receive_piece(receiving);
    }
    Control control;
    control.kind = ControlKind::grant;
    control.number = receiving.slot;
    control.id = at->id;
    send_control(receiving.message.peer, control);
    at = matched_.erase(at);
    moved = true;
  }
  return moved;
}

bool Transport::send_pieces() {
  bool moved = false;
  for (const auto& sending : granted_) {
    const Message& message = sending->message;
    int& in_flight = in_flight_[message.peer];
    while (in_flight < kPiecesInFlight && sending->next_piece < pieces_of(message)) {
      const auto bytes = piece_of(message, sending->next_piece++);
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Isend(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, message.peer, kDataTag + sending->slot,
                          MPI_COMM_WORLD, &request),
                "MPI_Isend");
      add_request(request, {.sending = sending.get(), .receiving = nullptr, .control = nullptr});
      ++in_flight;
      moved = true;
    }
  }
  return moved;
}

void Transport::post_receive_piece(Receiving& receiving) {
  const auto bytes = piece_of(receiving.message, receiving.next_piece++);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Irecv(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, receiving.message.peer, kDataTag + receiving.slot,
                      MPI_COMM_WORLD, &request),
            "MPI_Irecv");
  add_request(request, {.sending = nullptr, .receiving = &receiving, .control = nullptr});
}

void Transport::send_control(int peer, const Control& control) {
  static_assert(std::is_trivially_copyable_v<Control>);
  auto kept = std::make_shared<Control>(control);
  MPI_Request request = MPI_REQUEST_NULL;
  // The sender of an abort wants to know that it has arrived.
  const auto isend = control.kind == ControlKind::abort ? MPI_Issend : MPI_Isend;
  check_mpi(isend(kept.get(), sizeof(Control), MPI_BYTE, peer, kControlTag, MPI_COMM_WORLD, &request), "MPI_Isend");
  add_request(request, {.sending = nullptr, .receiving = nullptr, .control = std::move(kept)});
}

void Transport::post_control_receive(int index) {
  const auto i = static_cast<std::size_t>(index);
  check_mpi(MPI_Irecv(&control_buffers_[i], sizeof(Control), MPI_BYTE, MPI_ANY_SOURCE, kControlTag, MPI_COMM_WORLD,
                      &control_requests_[i]),
            "MPI_Irecv");
}

// Messages of a peer arrive in order and match the receives in the order these were posted, so only the oldest is asked.
bool Transport::take_control_messages() {
  bool moved = false;
  for (;;) {
    MPI_Status status = {};
    int done = 0;
    check_mpi(MPI_Test(&control_requests_[static_cast<std::size_t>(control_head_)], &done, &status), "MPI_Test");
    if (done == 0) return moved;
    const Control control = control_buffers_[static_cast<std::size_t>(control_head_)];
    post_control_receive(control_head_);
    control_head_ = (control_head_ + 1) % kControlReceives;
    handle(status.MPI_SOURCE, control);
    moved = true;
  }
}

void Transport::handle(int peer, const Control& control) {
  switch (control.kind) {
    case ControlKind::announce:
      announcements_[{peer, control.tag}].push_back({.id = control.id, .bytes = control.bytes});
      return;
    case ControlKind::grant: {
      const auto found = announced_.find(control.id);
      SPIPE_CHECK(found != announced_.end() && found->second->message.peer == peer, "a grant for no message of ours");
      found->second->slot = control.number;
      granted_.push_back(std::move(found->second));
      announced_.erase(found);
      return;
    }
    case ControlKind::abort:
      on_abort_(control.cause, control.number);
      return;
  }
}

void Transport::add_request(MPI_Request request, Request what) {
  requests_.push_back(request);
  owners_.push_back(std::move(what));
}

bool Transport::take_finished_requests() {
  if (requests_.empty()) return false;
  std::vector<int> finished(requests_.size());
  int count = 0;
  check_mpi(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, finished.data(), MPI_STATUSES_IGNORE),
            "MPI_Testsome");
  if (count == MPI_UNDEFINED || count == 0) return false;
  finished.resize(static_cast<std::size_t>(count));
  std::vector<Request> done;
  for (const int i : finished) done.push_back(std::move(owners_[static_cast<std::size_t>(i)]));
  std::ranges::sort(finished, std::greater<>());
  for (const int i : finished) {  // from the back, so that the last one fills the gap
    const auto index = static_cast<std::size_t>(i);
    requests_[index] = requests_.back();
    requests_.pop_back();
    if (index + 1 != owners_.size()) owners_[index] = std::move(owners_.back());
    owners_.pop_back();
  }
  for (const Request& request : done) finish_request(request);
  return true;
}

void Transport::finish_request(const Request& request) {
  if (request.sending != nullptr) {
    const Message message = request.sending->message;
    --in_flight_[message.peer];
    if (++request.sending->finished_pieces < pieces_of(message)) return;
    std::erase_if(granted_, [&](const auto& sending) { return sending.get() == request.sending; });
    sent_messages_.fetch_add(1);
    sent_bytes_.fetch_add(message.bytes.size());
    if (message.done != nullptr) message.done->signal(message.done_value);
  } else if (request.receiving != nullptr) {
    Receiving& receiving = *request.receiving;
    const Message message = receiving.message;
    if (receiving.next_piece < pieces_of(message)) post_receive_piece(receiving);
    if (++receiving.finished_pieces < pieces_of(message)) return;
    slots_[message.peer][static_cast<std::size_t>(receiving.slot)] = false;
    std::erase_if(receivings_, [&](const auto& open) { return open.get() == request.receiving; });
    received_messages_.fetch_add(1);
    received_bytes_.fetch_add(message.bytes.size());
    if (message.done != nullptr) message.done->signal(message.done_value);
  } else if (request.control->kind == ControlKind::abort) {
    const std::lock_guard<std::mutex> guard(lock_);
    telling_.fetch_sub(1);
    told_.notify_all();
  }
}

}  // namespace spipe::comm
