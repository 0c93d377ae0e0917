// safetensors files (format: tests/golden/data/README.md and huggingface/safetensors): hostile-input-safe reader, streaming
// writer.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "spipe/base/dtype.h"
#include "spipe/base/file.h"

namespace spipe::io {

struct TensorInfo {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::uint64_t> shape;  // any rank
  std::uint64_t begin = 0, end = 0;  // relative to the data section
  [[nodiscard]] std::uint64_t elements() const;
};

class SafetensorsFile {
 public:
  // Maps and checks everything before any data is touched: header length by subtraction (cap 100 MB), JSON depth, offsets
  // (non-negative integers, begin <= end <= data size), span = product(shape) * size without overflow, file complete
  // ("expected N bytes, file has M"), no duplicate names. Errors name file and tensor.
  explicit SafetensorsFile(const Path& path);
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const { return tensors_; }  // by name
  [[nodiscard]] const TensorInfo* find(const std::string& name) const;               // null when absent
  [[nodiscard]] std::span<const std::byte> data(const TensorInfo& tensor) const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Elements widened to fp32 (f32, bf16, f16, f64); Error for integer types.
  void read_f32(const TensorInfo& tensor, float* out) const { read_f32(tensor, 0, tensor.elements(), out); }
  // The same of `count` elements from `first` on.
  void read_f32(const TensorInfo& tensor, std::uint64_t first, std::uint64_t count, float* out) const;
  [[nodiscard]] const Path& path() const { return map_.path(); }

 private:
  MappedFile map_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::uint64_t data_begin_ = 0;
};

// Streams tensors in the order given at construction, no second copy in memory; finish() fsyncs.
class SafetensorsWriter {
 public:
  SafetensorsWriter(Path path, const std::vector<TensorInfo>& tensors, const std::map<std::string, std::string>& metadata = {});
  void write(const std::string& name, std::span<const std::byte> bytes);  // in order; a tensor whole or in parts
  void finish();

 private:
  std::vector<TensorInfo> tensors_;
  std::size_t next_ = 0;
  std::uint64_t written_ = 0;  // of the tensor that is next
  FileWriter file_;
};

}  // namespace spipe::io
