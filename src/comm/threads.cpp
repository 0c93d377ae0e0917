#include "threads.h"

#include <pthread.h>

#include <csignal>
#include <initializer_list>

namespace spipe::comm {

void name_thread_and_block_signals(const char* name) {
  ::pthread_setname_np(::pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  // Faults of the thread itself stay deadly.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace spipe::comm
