// One sequence, token by token: forward over a cache of keys and values, for generation. Runs on host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "spipe/model/shape.h"

namespace spipe::model {

class Decoder {
 public:
  // `parameters[s]` is the slab of store unit s in `compute` elements (ignored where the unit has no tensors); the caller keeps
  // it, and may change it between sequences. `ops` outlives the object and runs on the calling thread. `capacity`: tokens of
  // the longest sequence; at most max_positions where positions are learned. Dropout is off, whatever the architecture says.
  Decoder(const Architecture& architecture, DType compute, std::vector<const void*> parameters, Ops& ops,
          std::int64_t capacity);
  ~Decoder();
  // Adds tokens to the sequence (at least one, ids within the vocabulary, within the capacity: SPIPE_CHECKed). Returns the
  // logits behind the last of them, fp32 [vocab_size], valid until the next call.
  std::span<const float> append(std::span<const std::int32_t> tokens);
  void clear();  // an empty sequence
  void clear(std::vector<const void*> parameters);  // the same, with parameters that lie elsewhere now
  [[nodiscard]] std::int64_t length() const;
  [[nodiscard]] std::int64_t capacity() const;
  // Bytes that such an object takes beside the parameters.
  [[nodiscard]] static std::uint64_t bytes(const Architecture& architecture, DType compute, std::int64_t capacity);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spipe::model
