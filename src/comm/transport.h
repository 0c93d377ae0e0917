// Point-to-point messages over MPI, driven by the comm thread only (submission excepted).
//
// A send that is ready announces itself (tag, size). When the receive it belongs to is ready too, the receiver opens a slot,
// posts its first pieces and grants; only then do the bytes travel, in pieces, with a bounded number on the way to each peer.
// So no message waits in MPI's own memory, whatever the order of submission, and none can block another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include "spipe/comm/world.h"

namespace spipe::comm {

class Transport {
 public:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{4} << 20U;
  static constexpr int kPiecesInFlight = 4;   // to one peer
  static constexpr int kOpenTransfers = 4;    // granted to one peer at a time
  static constexpr int kControlReceives = 8;  // posted at any time

  using AbortHandler = std::function<void(const std::string& cause, int code)>;
  explicit Transport(AbortHandler on_abort);  // before MPI_Init; any thread
  ~Transport();

  // Any thread.
  void submit(const Message& message, bool is_send);
  [[nodiscard]] Traffic traffic() const;
  // Sends the cause to `ranks`; returns when that is done or `patience` is over.
  void tell_abort(const std::vector<int>& ranks, const std::string& cause, int code, std::chrono::milliseconds patience);
  void poke();  // ends the comm thread's nap

  // The comm thread.
  void start();  // after MPI_Init
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  void stop();                         // before MPI_Finalize; SPIPE_CHECKs that nothing is left
  bool progress();                     // returns whether anything moved
  void nap(bool moved);                // between two calls of progress: longer the longer nothing moves
  void complete(MPI_Request request);  // waits for a collective while everything else goes on

 private:
  struct Control;
  struct Sending;
  struct Receiving;
  struct Request;  // what an MPI request belongs to
  struct Announcement {
    std::uint64_t id = 0, bytes = 0;
  };
  struct Match {
    Receiving* receiving = nullptr;
    std::uint64_t id = 0;
  };
  using Key = std::pair<int, std::uint64_t>;  // peer, tag

  bool take_submissions();
  bool announce_ready_sends();
  bool match_receives();
  bool grant_ready_receives();
  bool send_pieces();
  bool take_control_messages();
  bool take_finished_requests();
  void handle(int peer, const Control& control);
  void post_control_receive(int index);
  void send_control(int peer, const Control& control);
  void post_receive_piece(Receiving& receiving);
  void finish_request(const Request& request);
  void add_request(MPI_Request request, Request what);
  [[nodiscard]] bool waiting() const;

  AbortHandler on_abort_;
  int rank_ = 0, size_ = 1;

  // Shared with submitting threads.
  mutable std::mutex lock_;
  std::condition_variable wake_, told_;
  bool poked_ = false;
  std::vector<std::pair<Message, bool>> submitted_;
  std::vector<std::pair<int, std::unique_ptr<Control>>> to_tell_;
  std::atomic<int> telling_{0};
  std::atomic<std::uint64_t> sent_messages_{0}, sent_bytes_{0}, received_messages_{0}, received_bytes_{0};

  // The comm thread's own.
  std::uint64_t next_id_ = 1;
  std::map<Key, std::deque<std::unique_ptr<Sending>>> unannounced_;
  std::map<std::uint64_t, std::unique_ptr<Sending>> announced_;  // by id
  std::list<std::unique_ptr<Sending>> granted_;                  // in the order of the grants
  std::map<Key, std::deque<std::unique_ptr<Receiving>>> expected_;
  std::map<Key, std::deque<Announcement>> announcements_;  // without a receive yet
  std::list<Match> matched_;                               // ungranted, in the order of the matches
  std::list<std::unique_ptr<Receiving>> receivings_;       // matched or open
  std::map<int, std::vector<bool>> slots_;                 // per peer: open transfers
  std::map<int, int> in_flight_;                           // pieces on the way to a peer
  std::vector<MPI_Request> requests_;
  std::vector<Request> owners_;
  std::vector<MPI_Request> control_requests_;
  std::unique_ptr<Control[]> control_buffers_;
  int control_head_ = 0;
  int idle_rounds_ = 0;
};

}  // namespace spipe::comm
