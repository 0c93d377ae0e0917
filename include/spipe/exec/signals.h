// Signals as flags, looked at between steps.
#pragma once

namespace spipe::exec {

enum class SignalRequest { none, save_and_go_on, save_and_stop };

// SIGBUS ends with a message, SIGXFSZ becomes an error of write(). SIGINT, SIGTERM, SIGHUP, SIGUSR2: save and stop (a SIGINT
// more than a second after the first ends the process at once with code 130); SIGUSR1: save, go on. Of several ranks SIGINT,
// SIGTERM and SIGHUP are the launcher's.
// First thing in main: what is asked while a run is set up is heeded after its first step.
void install_signal_handlers(bool several_ranks);
// The request since the last call (save_and_stop stays until the end).
[[nodiscard]] SignalRequest take_signal_request();

}  // namespace spipe::exec
