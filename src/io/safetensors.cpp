// safetensors: an 8-byte little-endian header length, a JSON header, then the raw tensors back to back. Nothing in the header
// is believed before it has been compared with the size of the file.
#include "spipe/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include "json_guard.h"
#include "spipe/base/checked.h"
#include "spipe/base/error.h"

namespace spipe::io {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and used in place");

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation

constexpr std::array<std::pair<DType, std::string_view>, 10> kDTypes{{{DType::f32, "F32"},
                                                                      {DType::bf16, "BF16"},
                                                                      {DType::f16, "F16"},
                                                                      {DType::f64, "F64"},
                                                                      {DType::i32, "I32"},
                                                                      {DType::i64, "I64"},
                                                                      {DType::u8, "U8"},
                                                                      {DType::u16, "U16"},
                                                                      {DType::u32, "U32"},
                                                                      {DType::boolean, "BOOL"}}};

std::string_view name_of(DType dtype) {
  for (const auto& [value, name] : kDTypes) {
    if (value == dtype) return name;
  }
  fail_check("dtype", "dtype without a safetensors name", __FILE__, __LINE__);
}

// The header: {"__metadata__": {text: text}, name: {"dtype": text, "shape": [n...], "data_offsets": [begin, end]}, ...}.
class HeaderSax final : public StrictSax {
 public:
  using StrictSax::StrictSax;

  std::vector<TensorInfo> tensors;
  std::map<std::string, std::string> metadata;

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) return go(Place::top);
    if (place_ == Place::tensor_value) return go(Place::tensor);
    if (place_ == Place::metadata_value) return go(Place::metadata);
    return unexpected("'{'");
  }
  bool key(std::string& name) override {
    if (place_ == Place::top) return begin_entry(name);
    if (place_ == Place::metadata) {
      name_ = name;
      return go(Place::metadata_text);
    }
    if (name == "dtype") return begin_field(Place::dtype, 0);
    if (name == "shape") return begin_field(Place::shape_value, 1);
    if (name == "data_offsets") return begin_field(Place::offsets_value, 2);
    refuse("tensor " + quote_name(name_) + ": unknown key " + quote_name(name));
  }
  bool string(std::string& value) override {
    if (place_ == Place::dtype) return set_dtype(value);
    if (place_ == Place::metadata_text) {
      if (!metadata.emplace(name_, value).second) refuse("metadata key " + quote_name(name_) + " appears twice");
      return go(Place::metadata);
    }
    return unexpected("text " + quote_name(value));
  }
  bool start_array(std::size_t) override {
    if (place_ == Place::shape_value) return go(Place::shape);
    if (place_ == Place::offsets_value) return go(Place::offsets);
    return unexpected("'['");
  }
  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape)
      tensors.back().shape.push_back(value);
    else if (place_ == Place::offsets)
      offsets_.push_back(value);
    else
      unexpected("number " + std::to_string(value));
    return true;
  }
  bool end_array() override {
    if (place_ == Place::offsets) {
      if (offsets_.size() != 2) refuse(context() + " needs two numbers, has " + std::to_string(offsets_.size()));
      tensors.back().begin = offsets_[0];
      tensors.back().end = offsets_[1];
    }
    return go(Place::tensor);
  }
  bool end_object() override {
    if (place_ != Place::tensor) return go(place_ == Place::metadata ? Place::top : Place::done);
    constexpr std::array<const char*, 3> kFields{"dtype", "shape", "data_offsets"};
    for (std::size_t i = 0; i < kFields.size(); ++i) {
      if (!seen_[i]) refuse("tensor " + quote_name(name_) + ": '" + kFields[i] + "' is missing");
    }
    return go(Place::top);
  }

 private:
  enum class Place {
    outside,
    top,
    metadata_value,
    metadata,
    metadata_text,
    tensor_value,
    tensor,
    dtype,
    shape_value,
    shape,
    offsets_value,
    offsets,
    done
  };

  [[nodiscard]] std::string context() const override {
    switch (place_) {
      case Place::metadata_value:
      case Place::metadata:
      case Place::metadata_text:
        return "__metadata__ (texts only)";
      case Place::tensor_value:
      case Place::tensor:
        return "tensor " + quote_name(name_);
      case Place::dtype:
        return "tensor " + quote_name(name_) + ": dtype";
      case Place::shape_value:
      case Place::shape:
        return "tensor " + quote_name(name_) + ": shape";
      case Place::offsets_value:
      case Place::offsets:
        return "tensor " + quote_name(name_) + ": data_offsets";
      default:
        return "safetensors header (wants an object of tensors)";
    }
  }

  bool go(Place place) {
    place_ = place;
    return true;
  }
  bool begin_entry(const std::string& name) {
    if (name == "__metadata__") {
      if (std::exchange(has_metadata_, true)) refuse("'__metadata__' appears twice");
      return go(Place::metadata_value);
    }
    name_ = name;
    seen_ = {};
    offsets_.clear();
    tensors.push_back({.name = name, .shape = {}});
    return go(Place::tensor_value);
  }
  bool begin_field(Place place, std::size_t field) {
    place_ = place;
    if (std::exchange(seen_[field], true)) refuse(context() + " appears twice");
    return true;
  }
  bool set_dtype(const std::string& value) {
    for (const auto& [dtype, name] : kDTypes) {
      if (name == value) {
        tensors.back().dtype = dtype;
        return go(Place::tensor);
      }
    }
    refuse(context() + " " + quote_name(value) + " is not supported");
  }

  Place place_ = Place::outside;
  std::string name_;
  bool has_metadata_ = false;
  std::array<bool, 3> seen_{};
  std::vector<std::uint64_t> offsets_;
};

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

// product(shape) * size, or nothing when it does not fit in 64 bits. A zero anywhere makes the product zero, but only after
// the other factors have been seen not to overflow: such a shape is never honest.
bool shape_bytes(const TensorInfo& tensor, std::uint64_t& bytes) {
  std::uint64_t product = dtype_size(tensor.dtype);
  bool zero = false;
  for (const std::uint64_t dim : tensor.shape) {
    if (dim == 0)
      zero = true;
    else if (__builtin_mul_overflow(product, dim, &product))
      return false;
  }
  bytes = zero ? 0 : product;
  return true;
}

void check_tensor(const TensorInfo& tensor, std::uint64_t file_bytes, std::uint64_t data_begin, const std::string& where) {
  const std::string name = "tensor " + quote_name(tensor.name);
  const std::string span = "data_offsets [" + std::to_string(tensor.begin) + ", " + std::to_string(tensor.end) + "]";
  if (tensor.begin > tensor.end) throw Error(name + ": " + span + " run backwards", where);
  std::uint64_t bytes = 0;
  const std::string shape = std::string(name_of(tensor.dtype)) + " " + shape_text(tensor.shape);
  if (!shape_bytes(tensor, bytes)) throw Error(name + ": the size of " + shape + " does not fit in 64 bits", where);
  if (bytes != tensor.end - tensor.begin) {
    throw Error(name + ": " + shape + " takes " + std::to_string(bytes) + " bytes, but " + span + " hold " +
                    std::to_string(tensor.end - tensor.begin),
                where);
  }
  if (tensor.end > file_bytes - data_begin) {
    std::uint64_t wanted = 0;
    const bool fits = !__builtin_add_overflow(data_begin, tensor.end, &wanted);
    throw Error(name + " ends past the end of the file: expected " + (fits ? std::to_string(wanted) : "2^64 or more") +
                    " bytes, file has " + std::to_string(file_bytes),
                where, "the file is cut short or damaged: copy or download it again");
  }
}

// The data section must be the tensors, each byte once: no holes, no overlaps, no tail (as the reference implementation).
void check_coverage(const std::vector<TensorInfo>& tensors, std::uint64_t file_bytes, std::uint64_t data_begin,
                    const std::string& where) {
  std::vector<const TensorInfo*> by_place;
  for (const TensorInfo& tensor : tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(),
            [](const TensorInfo* a, const TensorInfo* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  std::uint64_t place = 0;
  for (const TensorInfo* tensor : by_place) {
    if (tensor->begin != place) {
      throw Error("tensor " + quote_name(tensor->name) + " begins at byte " + std::to_string(tensor->begin) +
                      " of the data, but the tensors before it end at " + std::to_string(place),
                  where);
    }
    place = tensor->end;
  }
  if (data_begin + place != file_bytes) {
    throw Error("expected " + std::to_string(data_begin + place) + " bytes, file has " + std::to_string(file_bytes), where);
  }
}

}  // namespace

std::uint64_t TensorInfo::elements() const {
  std::uint64_t product = 1;
  for (const std::uint64_t dim : shape) product = checked_mul(product, dim);
  return product;
}

SafetensorsFile::SafetensorsFile(const Path& path) : map_(path) {
  const std::span<const std::byte> bytes = map_.bytes();
  const std::string where = path.string();
  if (bytes.size() < kLengthBytes) {
    throw Error("not a safetensors file: expected at least 8 bytes, file has " + std::to_string(bytes.size()), where);
  }
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > bytes.size() - kLengthBytes) {
    throw Error("not a safetensors file, or cut short: the header should have " + std::to_string(header_bytes) +
                    " bytes, the file has " + std::to_string(bytes.size() - kLengthBytes) + " after its length",
                where);
  }
  if (header_bytes > kMaxHeaderBytes) {
    throw Error("header of " + std::to_string(header_bytes) + " bytes is above the limit of 100 MB", where);
  }
  data_begin_ = kLengthBytes + header_bytes;

  const auto* text = reinterpret_cast<const char*>(bytes.data() + kLengthBytes);
  HeaderSax sax(where);
  nlohmann::json::sax_parse(text, text + header_bytes, &sax);
  tensors_ = std::move(sax.tensors);
  metadata_ = std::move(sax.metadata);

  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (i > 0 && tensors_[i].name == tensors_[i - 1].name) {
      throw Error("tensor " + quote_name(tensors_[i].name) + " appears twice", where);
    }
    check_tensor(tensors_[i], bytes.size(), data_begin_, where);
  }
  check_coverage(tensors_, bytes.size(), data_begin_, where);
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const TensorInfo& tensor, const std::string& wanted) { return tensor.name < wanted; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

std::span<const std::byte> SafetensorsFile::data(const TensorInfo& tensor) const {
  SPIPE_CHECK(tensor.begin <= tensor.end && tensor.end <= map_.bytes().size() - data_begin_, "tensor of another file");
  return map_.bytes().subspan(data_begin_ + tensor.begin, tensor.end - tensor.begin);
}

void SafetensorsFile::read_f32(const TensorInfo& tensor, std::uint64_t first, std::uint64_t count, float* out) const {
  SPIPE_CHECK(first <= tensor.elements() && count <= tensor.elements() - first, "elements of the tensor are read");
  const std::byte* source = data(tensor).data() + first * dtype_size(tensor.dtype);
  // Files written by others may hold tensors at odd addresses, hence memcpy for every element that is widened.
  const auto widen = [&](auto zero, auto convert) {
    for (std::uint64_t i = 0; i < count; ++i) {
      auto value = zero;
      std::memcpy(&value, source + i * sizeof(value), sizeof(value));
      out[i] = convert(value);
    }
  };
  switch (tensor.dtype) {
    case DType::f32:
      if (count > 0) std::memcpy(out, source, count * sizeof(float));
      return;
    case DType::bf16:
      return widen(std::uint16_t{0}, f32_from_bf16);
    case DType::f16:
      return widen(std::uint16_t{0}, f32_from_f16);
    case DType::f64:
      return widen(0.0, [](double value) { return static_cast<float>(value); });
    default:
      throw Error("tensor " + quote_name(tensor.name) + " is " + std::string(name_of(tensor.dtype)) +
                      ", expected floating-point numbers (F32, BF16, F16 or F64)",
                  path().string());
  }
}

SafetensorsWriter::SafetensorsWriter(Path path, const std::vector<TensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : tensors_(tensors), file_(std::move(path)) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t place = 0;
  std::set<std::string> names;
  for (TensorInfo& tensor : tensors_) {
    SPIPE_CHECK(names.insert(tensor.name).second, "two tensors named " + tensor.name);
    tensor.begin = place;
    tensor.end = place = checked_add(place, checked_mul(tensor.elements(), dtype_size(tensor.dtype)));
    nlohmann::ordered_json& entry = header[tensor.name];
    entry["dtype"] = name_of(tensor.dtype);
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {tensor.begin, tensor.end};
  }
  std::string text = header.dump();
  text.resize(round_up(text.size(), 8), ' ');
  const std::uint64_t header_bytes = text.size();
  SPIPE_CHECK(header_bytes <= kMaxHeaderBytes, "safetensors header above 100 MB");
  file_.write(std::as_bytes(std::span(&header_bytes, 1)));
  file_.write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::byte> bytes) {
  SPIPE_CHECK(next_ < tensors_.size() && tensors_[next_].name == name, "tensor " + name + " written out of order");
  const std::uint64_t size = tensors_[next_].end - tensors_[next_].begin;
  SPIPE_CHECK(bytes.size() <= size - written_, "tensor " + name + " written with a wrong size");
  file_.write(bytes);
  written_ += bytes.size();
  if (written_ < size) return;
  written_ = 0;
  ++next_;
}

void SafetensorsWriter::finish() {
  SPIPE_CHECK(next_ == tensors_.size(), "safetensors file finished before all tensors were written");
  file_.finish();
}

}  // namespace spipe::io
