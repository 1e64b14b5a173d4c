// Files of train_llama: token ids (.npy), configurations and checkpoints of Hugging Face (config.json,
// .safetensors).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tigon/base/dtype.h"

namespace files {

namespace fs = std::filesystem;
using nlohmann::json;

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

inline std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (!in) fail("cannot read " + path.string());
  return text;
}
inline void write_file(const fs::path& path, const std::string& text) {
  if (!(std::ofstream(path, std::ios::binary) << text).flush()) fail("cannot write " + path.string());
}

// Token ids: every byte of text files is one, or those of a .npy file of int32 (as examples/train_data.py
// writes it).
inline std::vector<int32_t> bytes_of(const std::vector<std::string>& names, size_t most) {
  std::vector<fs::path> paths;
  for (const fs::path name : names) {
    size_t first = paths.size();
    if (fs::is_directory(name)) {
      for (const auto& entry : fs::recursive_directory_iterator(name))
        if (entry.is_regular_file()) paths.push_back(entry.path());
    } else {
      paths.push_back(name);
    }
    std::sort(paths.begin() + std::ptrdiff_t(first), paths.end());
  }
  std::vector<int32_t> tokens;
  for (const fs::path& path : paths) {
    if (tokens.size() >= most) break;
    std::string text = read_file(path);
    if (text.find('\0') != text.npos) continue;  // no text
    for (char c : text) tokens.push_back(uint8_t(c));
  }
  return tokens;
}

inline std::vector<int32_t> read_npy(const fs::path& path) {
  std::string file = read_file(path);
  if (file.size() < 12 || file.compare(0, 6, "\x93NUMPY") != 0) fail(path.string() + " is no .npy file");
  uint32_t length = 0;
  bool old = file[6] == 1;  // versions 1 and later have the header's length in 2 and 4 bytes
  std::memcpy(&length, &file[8], old ? 2 : 4);
  size_t begin = (old ? 10 : 12) + size_t(length);
  std::string header = file.substr(0, begin);
  size_t count = (file.size() - begin) / sizeof(int32_t);
  if (header.find("'<i4'") == header.npos || header.find("(" + std::to_string(count) + ",)") == header.npos)
    fail(path.string() + " must hold int32 [tokens]");
  std::vector<int32_t> tokens(count);
  std::memcpy(tokens.data(), &file[begin], count * sizeof(int32_t));
  return tokens;
}
inline void write_npy(const fs::path& path, const std::vector<int32_t>& tokens) {
  std::string header =
      "{'descr': '<i4', 'fortran_order': False, 'shape': (" + std::to_string(tokens.size()) + ",), }";
  header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');
  std::string file = std::string("\x93NUMPY\x01\x00", 8);
  auto length = uint16_t(header.size() + 1);
  file.append(reinterpret_cast<const char*>(&length), 2).append(header).append("\n");
  file.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
  write_file(path, file);
}

// What a Llama's config.json says. Whatever this program does not compute is refused.
struct Config {
  int64_t vocab = 256, hidden = 256, intermediate = 704, layers = 4, heads = 4, kv_heads = 2, head_dim = 64;
  float eps = 1e-6f, theta = 10000.0f, init = 0.02f;
  bool tied = true;

  static Config read(const fs::path& path) {
    json j = json::parse(read_file(path));
    auto must = [&](bool held, const std::string& what) {
      if (!held) fail(path.string() + ": " + what);
    };
    auto rope = j.value("rope_parameters", json::object());
    if (auto old = j.find("rope_scaling"); old != j.end() && old->is_object()) rope.update(*old);
    std::string type = rope.value("rope_type", rope.value("type", std::string("default")));
    must(j.value("model_type", "") == "llama", "model_type must be llama");
    must(j.value("hidden_act", "silu") == "silu", "hidden_act must be silu");
    must(!j.value("attention_bias", false) && !j.value("mlp_bias", false), "biases are not supported");
    must(type == "default", "rope_type must be default, got " + type);
    Config c;
    c.vocab = j.at("vocab_size"), c.hidden = j.at("hidden_size"), c.intermediate = j.at("intermediate_size");
    c.layers = j.at("num_hidden_layers"), c.heads = j.at("num_attention_heads");
    c.kv_heads = j.value("num_key_value_heads", c.heads);
    auto dim = j.find("head_dim");
    c.head_dim = dim != j.end() && dim->is_number() ? int64_t(*dim) : c.hidden / c.heads;
    c.eps = j.value("rms_norm_eps", 1e-6f),
    c.theta = rope.value("rope_theta", j.value("rope_theta", 10000.0f));
    c.init = j.value("initializer_range", 0.02f), c.tied = j.value("tie_word_embeddings", false);
    must(c.heads % c.kv_heads == 0, "num_key_value_heads must divide num_attention_heads");
    return c;
  }
  void write(const fs::path& path, const char* dtype, int64_t positions) const {
    json j = {{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"vocab_size", vocab},
              {"hidden_size", hidden},
              {"intermediate_size", intermediate},
              {"num_hidden_layers", layers},
              {"num_attention_heads", heads},
              {"num_key_value_heads", kv_heads},
              {"head_dim", head_dim},
              {"hidden_act", "silu"},
              {"rms_norm_eps", eps},
              {"rope_theta", theta},
              {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", theta}}},
              {"initializer_range", init},
              {"tie_word_embeddings", tied},
              {"max_position_embeddings", positions},
              {"bos_token_id", nullptr},
              {"eos_token_id", nullptr},
              {"torch_dtype", dtype}};
    write_file(path, j.dump(2) + "\n");
  }
};

// Tensors of a checkpoint on the host: 8 bytes that say how long the header is, the header (JSON), the data.
struct HostTensor {
  tigon::DType dtype = tigon::DType::f32;
  std::vector<int64_t> shape;
  std::string data;
};
using Tensors = std::map<std::string, HostTensor>;

inline const char* safetensors_name(tigon::DType t) {
  return t == tigon::DType::f32 ? "F32" : t == tigon::DType::bf16 ? "BF16" : "F16";
}
inline tigon::DType safetensors_dtype(const std::string& name, const std::string& tensor) {
  for (auto t : {tigon::DType::f32, tigon::DType::bf16, tigon::DType::f16})
    if (name == safetensors_name(t)) return t;
  fail(tensor + ": dtype " + name + " is not supported");
}

// Of all .safetensors files in a folder.
inline Tensors read_checkpoint(const fs::path& folder) {
  Tensors tensors;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string file = read_file(entry.path());
    uint64_t length = 0;
    if (file.size() < 8) fail(entry.path().string() + " is cut off");
    std::memcpy(&length, file.data(), 8);
    if (length > file.size() - 8) fail(entry.path().string() + " is cut off");
    json header = json::parse(file.begin() + 8, file.begin() + 8 + std::ptrdiff_t(length));
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") continue;
      size_t begin = value["data_offsets"][0], end = value["data_offsets"][1], data = 8 + size_t(length);
      if (begin > end || end > file.size() - data) fail(entry.path().string() + " is cut off at " + name);
      tensors[name] = {safetensors_dtype(value["dtype"], name), value["shape"],
                       file.substr(data + begin, end - begin)};
    }
  }
  if (tensors.empty()) fail(folder.string() + " holds no .safetensors file");
  return tensors;
}
inline void write_checkpoint(const fs::path& path, const Tensors& tensors) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  size_t at = 0;
  for (const auto& [name, t] : tensors) {
    header[name] = {
        {"dtype", safetensors_name(t.dtype)}, {"shape", t.shape}, {"data_offsets", {at, at + t.data.size()}}};
    at += t.data.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  file += text;
  for (const auto& [name, t] : tensors) file += t.data;
  write_file(path, file);
}

}  // namespace files
