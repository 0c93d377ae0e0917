#pragma once

namespace spipe::comm {

// For comm's own threads: signals go to the engine's threads, and ps shows who is who (at most 15 characters).
void name_thread_and_block_signals(const char* name);

}  // namespace spipe::comm
