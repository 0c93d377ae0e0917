// Kernels with one planted bug each, and their sound twins (planted.cu). Each returns "" or the emulator's fault.
#pragma once

#include <cstdint>
#include <string>

namespace spipe::planted {

enum class Bug : std::uint8_t { none, planted };

std::string copy_past_the_end(float* dst, const float* src, int elements, Bug bug);  // reads src[elements]
std::string write_past_the_end(float* dst, int elements, Bug bug);                   // writes dst[elements]
std::string write_before_the_start(float* dst, int elements, Bug bug);               // writes dst[-1]
std::string misses_last_element(float* dst, int elements, Bug bug);                  // leaves one output unwritten
std::string copy_vectors(float* dst, const float* src, int vectors, Bug bug);        // from src + 1: misaligned
std::string barrier_in_a_branch(float* dst, Bug bug);                                // half of the threads wait elsewhere
std::string barrier_after_an_exit(float* dst, int elements, Bug bug);                // threads beyond the end return first
std::string missing_barrier(float* dst, Bug bug);                                    // neighbours' values, no barrier
std::string missing_warp_barrier(float* dst, Bug bug);                               // the same within a warp
std::string update_in_a_warp(float* dst, Bug bug);                                   // writes what its neighbour reads
std::string read_before_overwrite(float* dst, Bug bug);                              // write after read, no barrier
std::string blocks_race(float* dst, Bug bug);                                        // two blocks write one element
std::string in_place_halo(float* data, int elements, Bug bug);                       // reads what the next block writes
std::string plain_counter(unsigned* counter, Bug bug);                               // not atomic
std::string unwritten_shared(float* dst, Bug bug);                                   // reads what no thread wrote
std::string shared_index(float* dst, int index, Bug bug);                            // beyond a shared array
std::string dynamic_shared(float* dst, Bug bug);                                     // beyond what the launch asked for
std::string shuffle_in_a_branch(float* dst, Bug bug);                                // a full mask in half of the warp
std::string shuffle_from_outside(float* dst, Bug bug);                               // from a lane outside of the mask
std::string host_pointer(float* dst, const float* host, Bug bug);                    // reads the host's memory
std::string host_reads_device(float* dst, Bug bug);                                  // the host's code does
std::string int_overflow(float* dst, int elements, Bug bug);                         // a 32-bit index overflows
std::string neighbours_stack(float** slot, float* dst, Bug bug);                     // another thread's local variable
std::string tile_rows(unsigned* dst, bool transposed, Bug bug);                      // ldmatrix of misaligned rows

// Sound kernels that show what the emulator does.
std::string block_sum(float* out, const float* in, int elements);  // shuffles, shared memory, one barrier
std::string tile_product(float* dst);                              // mma: [16][8]
std::string votes(unsigned* out, int threads);                     // ballot, any, all, sub-warp shuffles
std::string count_atomically(unsigned* counter, unsigned blocks);
std::string reverse_by_dynamic_shared(float* data, int elements);
std::string no_barriers(float* out, int elements);

}  // namespace spipe::planted
