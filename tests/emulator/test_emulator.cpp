// The emulator's detectors: each finds its planted bug, names it, and has nothing to say about the sound twin.
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/emulator/machine.h"
#include "tests/emulator/planted.h"

namespace spipe::planted {
namespace {

using emulator::DeviceHeap;
using emulator::Machine;

// Device memory of a test: freed at its end. `written`: with zeros, by the host.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int elements, bool written = false) : elements_(elements) {
    data_ = reinterpret_cast<T*>(heap().allocate(bytes()));
    if (written) heap().fill(data_, 0, bytes());
  }
  ~Buffer() { heap().release(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void upload(const std::vector<T>& values) { heap().upload(data_, values.data(), bytes()); }
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> result(static_cast<std::size_t>(elements_));
    heap().download(result.data(), data_, bytes());
    return result;
  }
  [[nodiscard]] std::size_t unwritten() const { return heap().unwritten(data_, bytes()); }
  [[nodiscard]] T* get() const { return data_; }

 private:
  static DeviceHeap& heap() { return Machine::instance().heap(); }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(elements_) * sizeof(T); }
  int elements_;
  T* data_ = nullptr;
};

// `text` must be part of what is said of the bug. The emulator must be as good as new afterwards: the sound twin runs last.
void expect(const std::string& text, const std::function<std::string(Bug)>& run) {
  const std::string found = run(Bug::planted);
  CAPTURE(found);
  CHECK(found.find(text) != std::string::npos);
  CHECK(run(Bug::none).empty());
}

}  // namespace

TEST_CASE("the emulator finds accesses out of bounds of device memory") {
  const int n = 100;
  Buffer<float> out(n), in(n, true);
  expect("reads 4 bytes out of bounds, 0 bytes past the end of an allocation of 400",
         [&](Bug bug) { return copy_past_the_end(out.get(), in.get(), n, bug); });
  expect("writes 4 bytes out of bounds, 0 bytes past the end", [&](Bug bug) { return write_past_the_end(out.get(), n, bug); });
  expect("writes 4 bytes out of bounds, 4 bytes before an allocation of 400",
         [&](Bug bug) { return write_before_the_start(out.get(), n, bug); });
}

TEST_CASE("the emulator finds accesses out of bounds where another allocation or a guard lies") {
  Buffer<float> out(64), in(65, true);
  DeviceHeap& heap = Machine::instance().heap();
  heap.forbid(in.get() + 64, sizeof(float));
  expect("reads 4 bytes of forbidden memory", [&](Bug bug) { return copy_past_the_end(out.get(), in.get(), 64, bug); });
}

TEST_CASE("the emulator finds outputs that nobody wrote, and reads of what nobody wrote") {
  const int n = 100;
  Buffer<float> out(n), again(n);
  CHECK(misses_last_element(out.get(), n, Bug::planted).empty());
  CHECK(out.unwritten() == sizeof(float));
  CHECK(copy_past_the_end(again.get(), out.get(), n, Bug::none).find("reads 4 bytes that nobody wrote") != std::string::npos);
  CHECK(misses_last_element(out.get(), n, Bug::none).empty());
  CHECK(out.unwritten() == 0);
  CHECK(copy_past_the_end(again.get(), out.get(), n, Bug::none).empty());
  Machine::instance().heap().poison(out.get(), n * sizeof(float));  // what a host promises to be overwritten
  CHECK(out.unwritten() == n * sizeof(float));
  Buffer<float> shared_out(64);
  expect("that nobody wrote, in shared memory", [&](Bug bug) { return unwritten_shared(shared_out.get(), bug); });
}

TEST_CASE("the emulator finds misaligned vector accesses") {
  Buffer<float> out(256), in(257, true);
  expect("misaligned address: an access aligned to 16 bytes",
         [&](Bug bug) { return copy_vectors(out.get(), in.get(), 64, bug); });
}

TEST_CASE("the emulator finds barriers that not all threads reach") {
  Buffer<float> out(128);
  expect("barrier divergence", [&](Bug bug) { return barrier_in_a_branch(out.get(), bug); });
  expect("barrier divergence", [&](Bug bug) { return barrier_after_an_exit(out.get(), 100, bug); });
}

TEST_CASE("the emulator finds warp functions that not all lanes of the mask reach") {
  Buffer<float> out(32);
  expect("lane 0 of the mask has ended", [&](Bug bug) { return shuffle_in_a_branch(out.get(), bug); });
  expect("takes the value of a lane that is not in the mask", [&](Bug bug) { return shuffle_from_outside(out.get(), bug); });
}

TEST_CASE("the emulator finds races in shared memory") {
  Buffer<float> out(64);
  expect("race: reads", [&](Bug bug) { return missing_warp_barrier(out.get(), bug); });
  expect("race: writes", [&](Bug bug) { return update_in_a_warp(out.get(), bug); });
  expect("race: writes", [&](Bug bug) { return read_before_overwrite(out.get(), bug); });
  // Thread 0 of the second warp reads what the first warp wrote: only a block's barrier orders them.
  expect("", [&](Bug bug) { return missing_barrier(out.get(), bug); });
  CHECK_FALSE(missing_barrier(out.get(), Bug::planted).empty());
}

TEST_CASE("the emulator finds races in device memory") {
  Buffer<float> out(64);
  expect("which another block wrote", [&](Bug bug) { return blocks_race(out.get(), bug); });
  Buffer<float> data(64, true);
  expect("which another block read", [&](Bug bug) { return in_place_halo(data.get(), 64, bug); });
  Buffer<unsigned> counter(1, true);
  expect("race: ", [&](Bug bug) { return plain_counter(counter.get(), bug); });
}

TEST_CASE("the emulator finds indices beyond shared arrays") {
  Buffer<float> out(64);
  expect("index 16 out of an array's bounds", [&](Bug bug) { return shared_index(out.get(), 16, bug); });
  expect("at byte 256 of 256 of dynamic shared memory", [&](Bug bug) { return dynamic_shared(out.get(), bug); });
}

TEST_CASE("the emulator finds kernels in memory that is not theirs, and host code in the device's") {
  Buffer<float> out(64);
  const std::vector<float> host(4, 1.0F);
  expect("of the host's memory", [&](Bug bug) { return host_pointer(out.get(), host.data(), bug); });
  expect("the host writes 4 bytes of device memory", [&](Bug bug) { return host_reads_device(out.get(), bug); });
  Buffer<float*> slot(1);
  expect("of another thread's local variable", [&](Bug bug) { return neighbours_stack(slot.get(), out.get(), bug); });
}

TEST_CASE("the emulator finds 32-bit overflows of indices") {
  Buffer<float> out(64);
  expect("signed integer overflow at planted.cu", [&](Bug bug) { return int_overflow(out.get(), 1 << 15, bug); });
}

TEST_CASE("the emulator refuses launches that no device takes") {
  Buffer<float> out(64);
  CHECK_FALSE(reverse_by_dynamic_shared(out.get(), 1025).empty());  // threads of a block
  CHECK_FALSE(count_atomically(nullptr, 0).empty());                // no block
}

TEST_CASE("emulated shuffles, barriers and shared memory sum a block") {
  const int n = 1000, blocks = 4;
  Buffer<float> in(n), out(blocks);
  std::vector<float> values(n);
  for (int i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = static_cast<float>(i % 7);
  in.upload(values);
  CHECK(block_sum(out.get(), in.get(), n).empty());
  for (int block = 0; block < blocks; ++block) {
    float sum = 0;
    for (int i = 256 * block; i < std::min(n, 256 * (block + 1)); ++i) sum += values[static_cast<std::size_t>(i)];
    CHECK(out.values()[static_cast<std::size_t>(block)] == sum);
  }
}

TEST_CASE("emulated tensor cores load and multiply tiles as the PTX ISA lays them out") {
  Buffer<unsigned> rows(128);
  expect("misaligned address of a row", [&](Bug bug) { return tile_rows(rows.get(), false, bug); });
  for (const bool transposed : {false, true}) {
    CHECK(tile_rows(rows.get(), transposed, Bug::none).empty());
    for (unsigned i = 0; i < 128; ++i) {
      const unsigned lane = i / 4, tile = i % 4, g = lane / 4,
                     t = lane % 4;  // element [row][col] of a tile: 64 tile + 8 row + col
      const unsigned low = 64 * tile + (transposed ? 8 * (2 * t) + g : 8 * g + 2 * t);
      CHECK(rows.values()[i] == (low | (low + (transposed ? 8 : 1)) << 16));
    }
  }
  Buffer<float> product(128);
  CHECK(tile_product(product.get()).empty());
  for (int i = 0; i < 128; ++i) CHECK(product.values()[static_cast<std::size_t>(i)] == static_cast<float>(100 + i / 8 + i % 8));
}

TEST_CASE("emulated votes and shuffles of parts of a warp follow the programming guide") {
  Buffer<unsigned> out(64);
  CHECK(votes(out.get(), 64).empty());
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned lane = i % 32, up = lane % 8 == 0 ? lane : lane - 1, half = lane < 16 ? 15 : 16;
    CHECK(out.values()[i] == 1000 + 100 * up + half);
  }
}

TEST_CASE("emulated atomics and dynamic shared memory") {
  Buffer<unsigned> counter(2, true);
  CHECK(count_atomically(counter.get(), 5).empty());
  CHECK(counter.values() == std::vector<unsigned>{640, 639});
  Buffer<float> data(96);
  std::vector<float> values(96), reversed(96);
  for (std::size_t i = 0; i < 96; ++i) values[i] = reversed[95 - i] = static_cast<float>(i);
  data.upload(values);
  CHECK(reverse_by_dynamic_shared(data.get(), 96).empty());
  CHECK(data.values() == reversed);
}

TEST_CASE("emulated kernels without barriers never switch threads") {
  Buffer<float> out(1000);
  CHECK(no_barriers(out.get(), 1000).empty());
  CHECK(Machine::instance().counts().threads == 1024);
  CHECK(Machine::instance().counts().blocked == 0);
  CHECK(Machine::instance().counts().accesses >= 1000);
}

}  // namespace spipe::planted
