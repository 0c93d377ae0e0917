// `spipe measure`: what this machine achieves, as a hardware file.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace spipe::tools {

struct MeasureFlags {
  std::string output;                    // empty: the file's text is printed
  int threads = 0;                       // of one rank; 0: all processors
  std::string storage_size = "128 MiB";  // of the file that is written in the current folder and removed
};

CLI::App* add_measure_command(CLI::App& app, MeasureFlags& flags);
// Measures, prints a table, and writes or prints the hardware file. Throws Error for more threads than processors, and for
// folders that cannot be written.
void run_measure(const MeasureFlags& flags);

}  // namespace spipe::tools
