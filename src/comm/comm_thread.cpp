#include "comm_thread.h"

#include <sys/prctl.h>

#include <exception>
#include <utility>

#include "mpi_check.h"
#include "spipe/base/error.h"
#include "threads.h"

namespace spipe::comm {

void check_mpi(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Error(std::string(call) + ": " + text, "MPI", {}, ExitCode::kInternal);
}

CommThread::CommThread(Transport::AbortHandler on_abort, std::function<void(const std::string&)> failed)
    : transport_(std::move(on_abort)), failed_(std::move(failed)), thread_([this] { run(); }) {}

CommThread::~CommThread() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    leaving_ = true;
  }
  transport_.poke();
  thread_.join();
}

bool CommThread::wait_until_up(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> guard(lock_);
  return changed_.wait_for(guard, patience, [&] { return up_; });
}

void CommThread::call(const std::function<void(Transport&)>& work) {
  SPIPE_CHECK(std::this_thread::get_id() != thread_.get_id(), "a collective call from the comm thread itself");
  Call call{.work = &work, .done = false};
  std::unique_lock<std::mutex> guard(lock_);
  SPIPE_CHECK(!finalized_, "a collective call after the end of the job");
  calls_.push_back(&call);
  transport_.poke();
  changed_.wait(guard, [&] { return call.done; });
}

void CommThread::finalize() {
  call([](Transport& transport) {
    MPI_Request barrier = MPI_REQUEST_NULL;
    check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &barrier), "MPI_Ibarrier");
    transport.complete(barrier);
    transport.stop();
    check_mpi(MPI_Finalize(), "MPI_Finalize");
  });
}

void CommThread::run() {
  name_thread_and_block_signals("spipe-comm");
  (void)::prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // naps are as short as they say
  try {
    int provided = 0;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    transport_.start();
    loop();
  } catch (const std::exception& error) {
    // A peer's death shows here too, and is the better cause: give the watch time to name it.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    failed_(error.what());
  }
}

void CommThread::loop() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    up_ = true;
  }
  changed_.notify_all();
  for (;;) {
    Call* next = nullptr;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (leaving_) return;
      if (!calls_.empty()) {
        next = calls_.front();
        calls_.pop_front();
      }
    }
    if (next == nullptr) {
      transport_.nap(transport_.progress());
      continue;
    }
    (*next->work)(transport_);
    int finalized = 0;
    MPI_Finalized(&finalized);
    {
      const std::lock_guard<std::mutex> guard(lock_);
      next->done = true;
      finalized_ = finalized != 0;
    }
    changed_.notify_all();
    if (finalized != 0) return;
  }
}

}  // namespace spipe::comm
