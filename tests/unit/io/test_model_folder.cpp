#include <algorithm>
#include <map>
#include <optional>

#include "spipe/io/checkpoint.h"
#include "spipe/io/safetensors.h"
#include "test_files.h"
#include "test_models.h"

namespace spipe::io {
namespace {

using test::contains;
using test::error_line;
using test::parameter_of;
using test::TempFolder;
using test::tiny_shape;
using test::TinyStore;
using test::write_file;

struct Tensor {
  std::vector<std::uint64_t> shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Tensor>;

Tensors golden_tensors(const std::string& name) {
  const SafetensorsFile file("tests/golden/data/" + name + "/model.safetensors");
  Tensors tensors;
  for (const TensorInfo& info : file.tensors()) {
    Tensor& tensor = tensors[info.name];
    tensor.shape = info.shape;
    tensor.values.resize(info.elements());
    file.read_f32(info, tensor.values.data());
  }
  return tensors;
}

// Writes tensors in a float type.
void write_tensors(const std::filesystem::path& path, const Tensors& tensors, DType dtype = DType::f32) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos.push_back({.name = name, .dtype = dtype, .shape = tensor.shape});
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : tensors) {
    if (dtype == DType::f32) {
      writer.write(name, std::as_bytes(std::span(tensor.values)));
      continue;
    }
    std::vector<std::uint16_t> half;
    for (const float value : tensor.values) half.push_back(dtype == DType::bf16 ? bf16_from_f32(value) : f16_from_f32(value));
    writer.write(name, std::as_bytes(std::span(half)));
  }
  writer.finish();
}

// Values of one parameter after loading a folder that holds `tensors`.
struct Loaded {
  explicit Loaded(const model::ModelShape& from) : shape(from), tiny(from) {}
  model::ModelShape shape;
  TinyStore tiny;
  [[nodiscard]] std::vector<float> values(const std::string& name) const {
    int unit = 0;
    const model::Parameter& p = parameter_of(shape, name, &unit);
    const float* master = tiny.store.master(unit) + p.offset;
    return {master, master + p.elements()};
  }
};
std::unique_ptr<Loaded> load(const std::filesystem::path& folder, const model::ModelShape& shape) {
  auto loaded = std::make_unique<Loaded>(shape);
  load_model(folder, shape, loaded->tiny.store);
  return loaded;
}
std::string refusal(const std::filesystem::path& folder, const model::ModelShape& shape) {
  return error_line([&] { (void)load(folder, shape); });
}

TEST_CASE("every golden model loads, value for value") {
  for (const char* name : {"gpt2", "opt", "llama", "llama3_rope", "qwen2", "qwen3", "mistral"}) {
    INFO(name);
    const model::ModelShape shape = tiny_shape(name);
    const auto loaded = load(std::string("tests/golden/data/") + name, shape);
    std::size_t found = 0;
    for (const auto& [tensor_name, tensor] : golden_tensors(name)) {
      const std::string canonical = model::canonical_tensor_name(shape.architecture, tensor_name);
      if (canonical.empty()) continue;
      CHECK(loaded->values(canonical) == tensor.values);
      ++found;
    }
    CHECK(found > 10);
  }
}

TEST_CASE("bf16 and fp16 files are widened into the master - the bf16 compute copy is rounded half up (CASES O25)") {
  const TempFolder folder;
  Tensors tensors = golden_tensors("llama");
  std::vector<float>& norm = tensors.at("model.norm.weight").values;
  // 1 + 2^-8 lies between two bf16 numbers, at the middle: half up gives the upper one, nearest even the lower.
  norm[0] = 1.0F + 0x1p-8F;
  write_tensors(folder / "model.safetensors", tensors);
  const model::ModelShape shape = tiny_shape("llama", DType::bf16);
  const auto loaded = load(folder.path(), shape);
  CHECK(loaded->values("model.norm.weight") == norm);
  int unit = 0;
  const model::Parameter& p = parameter_of(shape, "model.norm.weight", &unit);
  const auto* compute = static_cast<const std::uint16_t*>(loaded->tiny.store.slab(unit, store::Plane::compute).data) + p.offset;
  CHECK(compute[0] == 0x3f81);
  for (std::size_t i = 0; i < norm.size(); ++i) CHECK(compute[i] == bf16_from_f32_half_up(norm[i]));

  for (const DType dtype : {DType::bf16, DType::f16}) {
    write_tensors(folder / "model.safetensors", tensors, dtype);
    const auto narrow = load(folder.path(), tiny_shape("llama"));
    for (const auto& [name, tensor] : tensors) {
      std::vector<float> rounded;
      for (const float value : tensor.values) {
        rounded.push_back(dtype == DType::bf16 ? f32_from_bf16(bf16_from_f32(value)) : f32_from_f16(f16_from_f32(value)));
      }
      CHECK(narrow->values(name) == rounded);
    }
  }
  norm[1] = 3.4e38F;  // finite in fp32, infinite in bf16
  write_tensors(folder / "model.safetensors", tensors);
  const std::string line = refusal(folder.path(), shape);
  CHECK(contains(line, "'model.norm.weight': 1 values are too large for bf16"));
  CHECK_NOTHROW(load(folder.path(), tiny_shape("llama")));
}

TEST_CASE("tied embeddings, four ways (CASES O18)") {
  const TempFolder folder;
  const auto file = folder / "model.safetensors";
  const Tensors untied = golden_tensors("llama");
  const model::ModelShape untied_shape = tiny_shape("llama");
  model::Architecture tied_architecture = untied_shape.architecture;
  tied_architecture.tied_embeddings = true;
  const model::ModelShape tied_shape = model::make_shape(tied_architecture, untied_shape.batch, DType::f32);

  Tensors no_head = untied;
  no_head.erase("lm_head.weight");
  write_tensors(file, no_head);
  CHECK(load(folder.path(), tied_shape)->values("model.embed_tokens.weight") == untied.at("model.embed_tokens.weight").values);
  CHECK(contains(refusal(folder.path(), untied_shape), "'lm_head.weight' is missing and config.json does not tie it"));

  Tensors equal_head = no_head;
  equal_head["lm_head.weight"] = untied.at("model.embed_tokens.weight");
  equal_head["lm_head.weight"].values[3] = equal_head["model.embed_tokens.weight"].values[3] = std::nanf("");
  write_tensors(file, equal_head);
  CHECK_NOTHROW(load(folder.path(), tied_shape));

  write_tensors(file, untied);
  CHECK(contains(refusal(folder.path(), tied_shape), "tie_word_embeddings, but 'lm_head.weight' differs"));
  CHECK_NOTHROW(load(folder.path(), untied_shape));

  // Hosts that have the table compare it; the shape is everybody's.
  std::vector<bool> here(tied_shape.store_units.size(), true);
  const auto load_part = [&](bool with_table) {
    here[static_cast<std::size_t>(tied_shape.tied_unit)] = with_table;
    store::Store part(tied_shape, store::make_store_layout(tied_shape, store::store_format(DType::f32), here));
    load_model(folder.path(), tied_shape, part);
  };
  CHECK(contains(error_line([&] { load_part(true); }), "'lm_head.weight' differs"));
  CHECK_NOTHROW(load_part(false));
  Tensors short_head = untied;
  short_head["lm_head.weight"] = {.shape = {1}, .values = {0.0F}};
  write_tensors(file, short_head);
  CHECK(contains(error_line([&] { load_part(false); }), "has shape"));
}

TEST_CASE("missing, stray and misshapen tensors are refused by name (CASES O22, O26)") {
  const TempFolder folder;
  const auto file = folder / "model.safetensors";
  const Tensors good = golden_tensors("llama");
  const model::ModelShape shape = tiny_shape("llama");
  const auto line = [&](auto change) {
    Tensors tensors = good;
    change(tensors);
    write_tensors(file, tensors);
    return refusal(folder.path(), shape);
  };
  const std::string missing = line([](Tensors& t) {
    t.erase("model.layers.0.mlp.up_proj.weight");
    t.erase("model.norm.weight");
  });
  CHECK(contains(missing, "2 tensors of the model are missing"));
  CHECK(contains(missing, "'model.layers.0.mlp.up_proj.weight'"));
  const std::string bias = "model.layers.0.self_attn.q_proj.bias";
  CHECK(contains(line([&](Tensors& t) { t[bias] = {{32}, std::vector<float>(32, 0.5F)}; }), "'" + bias + "'"));
  CHECK(contains(line([](Tensors& t) { t["foo.weight"] = {{1}, {0}}; }), "'foo.weight'"));
  const std::string vocabulary = line([](Tensors& t) {
    Tensor& table = t.at("model.embed_tokens.weight");
    table.shape[0] -= 1;
    table.values.resize(table.values.size() - table.shape[1]);
  });
  CHECK(contains(vocabulary, "'model.embed_tokens.weight' has shape [127, 32], the model needs [128, 32]"));
  CHECK(contains(line([](Tensors& t) { t.at("model.norm.weight").shape = {1, 32}; }), "has shape [1, 32]"));
  // Quiet: a buffer that old exporters write.
  Tensors buffer = good;
  buffer["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{4}, {1, 2, 3, 4}};
  write_tensors(file, buffer);
  CHECK_NOTHROW(load(folder.path(), shape));
  // Qwen2 needs its biases.
  Tensors qwen = golden_tensors("qwen2");
  CHECK(qwen.erase("model.layers.0.self_attn.k_proj.bias") == 1);
  write_tensors(file, qwen);
  CHECK(contains(refusal(folder.path(), tiny_shape("qwen2")), "'model.layers.0.self_attn.k_proj.bias'"));
}

TEST_CASE("GPT-2 with and without prefix and with mask buffers gives the same parameters (CASES O23)") {
  const TempFolder folder;
  const auto file = folder / "model.safetensors";
  const model::ModelShape shape = tiny_shape("gpt2");
  const Tensors prefixed = golden_tensors("gpt2");
  REQUIRE(prefixed.contains("transformer.h.0.attn.c_proj.weight"));
  Tensors bare, buffers;
  for (const auto& [name, tensor] : prefixed) bare[name.substr(std::string("transformer.").size())] = tensor;
  buffers = bare;
  buffers["h.0.attn.bias"] = {{1, 1, 4, 4}, std::vector<float>(16, 1)};
  buffers["h.1.attn.masked_bias"] = {{}, {-1e4F}};
  for (const Tensors& tensors : {prefixed, bare, buffers}) {
    write_tensors(file, tensors);
    const auto loaded = load(folder.path(), shape);
    for (const auto& [name, tensor] : prefixed) CHECK(loaded->values(name) == tensor.values);
  }
  Tensors both = bare;
  both["transformer.wte.weight"] = both["wte.weight"];
  write_tensors(file, both);
  CHECK(contains(refusal(folder.path(), shape), "is there twice"));
}

// Splits tensors into two shards and writes them with their index.
struct Sharded {
  Tensors first, second;
  std::map<std::string, std::string> index;
  static constexpr const char* kFirst = "model.safetensors-00001-of-00002.safetensors";  // odd, but valid
  static constexpr const char* kSecond = "model-00002-of-00002.safetensors";

  explicit Sharded(const Tensors& all) {
    bool one = true;
    for (const auto& [name, tensor] : all) {
      (one ? first : second)[name] = tensor;
      index[name] = one ? kFirst : kSecond;
      one = !one;
    }
  }
  void write(const std::filesystem::path& folder) const {
    write_tensors(folder / kFirst, first);
    write_tensors(folder / kSecond, second);
    std::string text = R"({"metadata": {"total_size": 1}, "weight_map": {)";
    const char* comma = "";
    for (const auto& [name, file] : index) {
      text += std::string(comma) + "\"" + name + "\": \"" + file + "\"";
      comma = ", ";
    }
    write_file(folder / "model.safetensors.index.json", text + "}}");
  }
};

TEST_CASE("shards load by their index, and index and shards must agree (CASES O17)") {
  const model::ModelShape shape = tiny_shape("llama");
  const Tensors all = golden_tensors("llama");
  const TempFolder folder;
  const auto line = [&](const Sharded& sharded) {
    sharded.write(folder.path());
    return refusal(folder.path(), shape);
  };
  const Sharded good(all);
  good.write(folder.path());
  const auto loaded = load(folder.path(), shape);
  for (const auto& [name, tensor] : all) CHECK(loaded->values(name) == tensor.values);

  SECTION("missing shards are all listed") {
    Sharded sharded = good;
    sharded.index.begin()->second = "model-00003-of-00004.safetensors";
    sharded.index.rbegin()->second = "model-00004-of-00004.safetensors";
    const std::string text = line(sharded);
    CHECK(contains(text, "2 of 4 shards are missing"));
    CHECK(contains(text, "model-00003-of-00004"));
    CHECK(contains(text, "model-00004-of-00004"));
  }
  SECTION("a tensor mapped to the wrong shard") {
    Sharded sharded = good;
    sharded.index.begin()->second = Sharded::kSecond;
    CHECK(contains(line(sharded), "'" + good.index.begin()->first + "' lies here, but the index puts it into"));
  }
  SECTION("a tensor of the index that no shard has, and one of a shard that the index has not") {
    Sharded sharded = good;
    const std::string name = sharded.second.begin()->first;
    sharded.second.erase(name);
    CHECK(contains(line(sharded), "'" + name + "'"));
    sharded = good;
    sharded.index.erase(name);
    CHECK(contains(line(sharded), "'" + name + "' is not in the index"));
  }
  SECTION("names outside the folder") {
    for (const std::string& name : {std::string("../../etc/x.safetensors"), std::string("/etc/x.safetensors"),
                                    std::string(".."), std::string("a/b.safetensors"), std::string()}) {
      Sharded sharded = good;
      sharded.index.begin()->second = name;
      const std::string text = line(sharded);
      CHECK(contains(text, "is not a file of this folder"));
      CHECK(contains(text, "'" + name + "'"));
    }
  }
  SECTION("an index and a single file") {
    write_tensors(folder / "model.safetensors", all);
    CHECK(contains(refusal(folder.path(), shape), "has both"));
  }
  SECTION("the same tensor in both shards") {
    Sharded sharded = good;
    sharded.second.insert(*sharded.first.begin());
    CHECK(contains(line(sharded), "'" + sharded.first.begin()->first + "' lies here"));
  }
  SECTION("broken indexes") {
    const std::vector<std::pair<std::string, std::string>> cases{
        {"", "not valid JSON"},
        {"[]", "no 'weight_map' object"},
        {"{}", "no 'weight_map' object"},
        {R"({"weight_map": []})", "no 'weight_map' object"},
        {R"({"weight_map": {}})", "empty"},
        {R"({"weight_map": {"a": 1}})", "'a' is not a file name"},
        {R"({"weight_map": {"a": "x", "a": "y"}})", "'a' appears twice"},
        {R"({"a":)" + std::string(100'000, '['), "nested deeper"},
    };
    for (const auto& [text, mentions] : cases) {
      write_file(folder / "model.safetensors.index.json", text);
      CHECK(contains(refusal(folder.path(), shape), mentions));
    }
  }
}

TEST_CASE("a folder without safetensors files is refused with what is read") {
  const TempFolder folder;
  write_file(folder / "pytorch_model.bin", "x");
  CHECK(contains(refusal(folder.path(), tiny_shape("llama")), "no model.safetensors"));
}

}  // namespace
}  // namespace spipe::io
