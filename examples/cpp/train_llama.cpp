// Trains a Llama with Tigon's C++ library alone, on the CPU or a GPU, and leaves a checkpoint that
// transformers loads:
//   train_llama --data FILES_OR_FOLDERS      every byte of the text is a token
//   train_llama --tokens tokens.npy          token ids, such as those that examples/train.py caches
//   train_llama --model FOLDER               starts from a checkpoint (config.json, *.safetensors)
// The same steps as examples/train.py, in the same order on the same batches: embedding, layers of RMSNorm,
// RoPE, attention, SwiGLU, the loss head (llama.h), AdamW with clipping at 1 and a cosine schedule. `--steps
// 0` writes the checkpoint it would start from.
#include <chrono>
#include <cstdio>
#include <exception>
#include <numeric>
#include <random>

#include <unistd.h>

#include "llama.h"
#include "tigon/ops/adamw/adamw.h"
#include "tigon/ops/grad_norm/grad_norm.h"

namespace {

using files::fail;
using llama::Llama;
using llama::Memory;
using llama::Parameter;
using tigon::DType;
using tigon::Matrix;
using tigon::Vector;

struct Options {
  std::vector<std::string> data;
  std::string tokens, model, out = "out/cpp", device = "cpu", dtype;
  int64_t steps = 60, batch = 8, seq = 256, seed = 0, threads = 0;
  double lr = 1e-3;
};

// --- Optimizer. ---

// AdamW with the hyperparameters of examples/train.py.
class Optimizer {
 public:
  Optimizer(std::vector<Parameter*> parameters, Memory& memory) : parameters_(std::move(parameters)) {
    for (Parameter* p : parameters_) gradients_.push_back(llama::flat(p->gradient));
    total_ = memory.vector(DType::f64, 1), norm_ = memory.vector(DType::f32, 1),
    factor_ = memory.vector(DType::f32, 1);
  }
  void step(tigon::Context& ctx, int64_t done, double lr) {
    tigon::grad_norm(
        ctx, {.grads = gradients_, .max_norm = 1.0f, .total = total_, .norm = norm_, .factor = factor_});
    std::vector<tigon::AdamwTensor> tensors;
    for (Parameter* p : parameters_)
      tensors.push_back({.param = llama::flat(p->value),
                         .grad = llama::flat(p->gradient),
                         .exp_avg = llama::flat(p->exp_avg),
                         .exp_avg_sq = llama::flat(p->exp_avg_sq),
                         .steps = done});
    tigon::AdamwGroup group = {.lr = lr, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    tigon::adamw(ctx, {.tensors = tensors, .groups = {&group, 1}, .clip = factor_});
  }

 private:
  std::vector<Parameter*> parameters_;
  std::vector<Vector> gradients_;
  Vector total_, norm_, factor_;
};

// Warm-up over a tenth of the run, then half a cosine down to a tenth.
double learning_rate(int64_t step, int64_t steps) {
  int64_t warmup = std::max<int64_t>(1, steps / 10);
  if (step < warmup) return double(step + 1) / double(warmup);
  double done = double(step - warmup) / double(std::max<int64_t>(1, steps - warmup));
  return 0.1 + 0.45 * (1 + std::cos(std::acos(-1.0) * done));
}

// --- Batches: those of examples/train_data.py. ---

// splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Batches {
 public:
  Batches(std::vector<int32_t> tokens, const Options& o) : tokens_(std::move(tokens)), o_(o) {
    size_t least = size_t(o.batch * o.seq), given = tokens_.size();
    while (tokens_.size() < least)
      tokens_.push_back(tokens_[tokens_.size() - given]);  // a short text is read again and again
  }
  std::vector<int64_t> next() {
    while (int64_t(queue_.size()) < o_.batch) shuffle();
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < o_.batch; ++i) {
      auto row = tokens_.begin() + queue_[size_t(i)] * o_.seq;
      ids.insert(ids.end(), row, row + o_.seq);
    }
    queue_.erase(queue_.begin(), queue_.begin() + o_.batch);
    return ids;
  }

 private:
  // All rows once more, in the order of a hash of seed, epoch and row.
  void shuffle() {
    std::vector<int64_t> rows(tokens_.size() / size_t(o_.seq));
    std::iota(rows.begin(), rows.end(), 0);
    uint64_t base = mix(mix(uint64_t(o_.seed)) + epoch_++);
    auto before = [&](int64_t a, int64_t b) {
      return std::pair(mix(base + uint64_t(a)), a) < std::pair(mix(base + uint64_t(b)), b);
    };
    std::sort(rows.begin(), rows.end(), before);
    queue_.insert(queue_.end(), rows.begin(), rows.end());
  }

  std::vector<int32_t> tokens_;
  std::vector<int64_t> queue_;
  uint64_t epoch_ = 0;
  Options o_;
};

// Position t predicts token t + 1; the last one of a sequence predicts nothing.
std::vector<int64_t> labels_of(const std::vector<int64_t>& ids, int64_t seq) {
  std::vector<int64_t> labels(ids.size(), -100);
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    if ((i + 1) % size_t(seq) != 0) labels[i] = ids[i + 1];
  return labels;
}

// --- Values of the parameters. ---

void store_float(std::string& data, DType t, float x) {
  auto append = [&](auto value) { data.append(reinterpret_cast<const char*>(&value), sizeof value); };
  if (t == DType::f32) append(x);
  if (t == DType::bf16) append(tigon::from_float<tigon::bf16>(x));
  if (t == DType::f16) append(tigon::from_float<tigon::f16>(x));
}
float load_float(const char* data, DType t, size_t i) {
  auto read = [&](auto value) {
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    return tigon::to_float(value);
  };
  return t == DType::f32 ? read(0.0f) : t == DType::bf16 ? read(tigon::bf16{}) : read(tigon::f16{});
}

// Random, or of the checkpoint; the moments are 0.
void fill(Llama& model, const files::Config& c, const files::Tensors& given, int64_t seed, Memory& memory) {
  std::mt19937_64 bits{uint64_t(seed)};
  std::normal_distribution<float> normal(0.0f, c.init);
  for (Parameter* p : model.parameters()) {
    std::string values;
    DType dtype = p->value.dtype;
    for (const auto& part : p->parts) {
      auto count = size_t(part.rows * p->value.cols);
      if (given.empty()) {
        for (size_t i = 0; i < count; ++i) store_float(values, dtype, p->norm ? 1.0f : normal(bits));
        continue;
      }
      auto found = given.find(part.name);
      if (found == given.end()) fail("the checkpoint has no " + part.name);
      const auto& tensor = found->second;
      if (tensor.data.size() != count * tigon::size_of(tensor.dtype))
        fail(part.name + " has another size than the model");
      for (size_t i = 0; i < count; ++i)
        store_float(values, dtype, load_float(tensor.data.data(), tensor.dtype, i));
    }
    memory.upload(p->value.data, values.data(), values.size());
    std::string zeros(values.size(), '\0');
    for (const Matrix& m : {p->exp_avg, p->exp_avg_sq}) memory.upload(m.data, zeros.data(), zeros.size());
  }
}

void save(Llama& model, const files::Config& c, const Options& o, Memory& memory) {
  files::Tensors tensors;
  DType dtype = DType::f32;
  for (Parameter* p : model.parameters()) {
    int64_t row = 0;
    dtype = p->value.dtype;
    for (const auto& part : p->parts) {
      std::string data(size_t(part.rows * p->value.cols) * tigon::size_of(dtype), '\0');
      memory.download(data.data(), llama::block(p->value, row, part.rows, 0, p->value.cols).data,
                      data.size());
      std::vector<int64_t> shape{part.rows, p->value.cols};
      if (p->norm) shape = {p->value.cols};
      tensors[part.name] = {dtype, shape, std::move(data)};
      row += part.rows;
    }
  }
  files::fs::path folder = files::fs::path(o.out) / "checkpoint";
  files::fs::create_directories(folder);
  files::write_checkpoint(folder / "model.safetensors", tensors);
  c.write(folder / "config.json", tigon::name_of(dtype), std::max<int64_t>(2048, o.seq));
  std::printf("%s: loads with transformers' from_pretrained\n", folder.c_str());
}

// --- The run. ---

Options parse(int count, char** words) {
  Options o;
  std::map<std::string, std::string*> texts{{"--tokens", &o.tokens},
                                            {"--model", &o.model},
                                            {"--out", &o.out},
                                            {"--device", &o.device},
                                            {"--dtype", &o.dtype}};
  std::map<std::string, int64_t*> numbers{{"--steps", &o.steps},
                                          {"--batch", &o.batch},
                                          {"--seq", &o.seq},
                                          {"--seed", &o.seed},
                                          {"--threads", &o.threads}};
  for (int i = 1; i < count; ++i) {
    std::string word = words[i];
    auto value = [&]() -> std::string {
      return ++i < count ? words[i] : (fail(word + " needs a value"), "");
    };
    if (word == "--data") {
      while (i + 1 < count && words[i + 1][0] != '-') o.data.push_back(words[++i]);
    } else if (texts.count(word)) {
      *texts[word] = value();
    } else if (numbers.count(word) || word == "--lr") {
      std::string text = value();
      char* end = nullptr;
      double number = std::strtod(text.c_str(), &end);
      if (*end || text.empty() || number < 0) fail(word + " must be a number, got " + text);
      if (word == "--lr")
        o.lr = number;
      else
        *numbers[word] = int64_t(number);
    } else {
      fail("unknown option " + word +
           ": of --data --tokens --model --out --device --dtype --steps --batch --seq --seed "
           "--threads --lr");
    }
  }
  if (o.data.empty() == o.tokens.empty()) fail("give --data FILES or --tokens FILE.npy");
  if (o.batch < 1 || o.seq < 2) fail("--batch must be at least 1, --seq at least 2");
  if (o.device != "cpu" && o.device != "cuda") fail("--device must be cpu or cuda, got " + o.device);
#ifndef TRAIN_LLAMA_CUDA
  if (o.device == "cuda") fail("--device cuda: this program was built without the CUDA toolkit");
#endif
  if (o.dtype.empty()) o.dtype = o.device == "cuda" ? "bfloat16" : "float32";
  if (o.dtype != "float32" && o.dtype != "bfloat16")
    fail("--dtype must be float32 or bfloat16, got " + o.dtype);
  return o;
}

int run(const Options& o) {
  files::Config config;
  files::Tensors given;
  if (!o.model.empty()) {
    config = files::Config::read(files::fs::path(o.model) / "config.json");
    given = files::read_checkpoint(o.model);
  }
  std::vector<int32_t> tokens =
      o.tokens.empty() ? files::bytes_of(o.data, 20'000'000) : files::read_npy(o.tokens);
  if (tokens.empty()) fail("the text is empty");
  auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  if (*least < 0) fail("token ids must not be negative");
  if (o.model.empty()) config.vocab = std::max<int64_t>(256, (*most + 64) / 64 * 64);
  if (*most >= config.vocab) fail("token " + std::to_string(*most) + " is outside the model's vocabulary");
  files::fs::create_directories(o.out);
  if (o.tokens.empty()) files::write_npy(files::fs::path(o.out) / "tokens.npy", tokens);

  Memory memory(o.device == "cuda", int(o.threads));
  Llama model(config, o.dtype == "float32" ? DType::f32 : DType::bf16, o.batch, o.seq, memory);
  fill(model, config, given, o.seed, memory);
  Optimizer optimizer(model.parameters(), memory);
  int64_t size = 0;
  for (Parameter* p : model.parameters()) size += p->value.rows * p->value.cols;
  std::printf("%.1f M parameters, %zu tokens of text; %lld steps of %lld x %lld tokens, %s on %s\n",
              double(size) / 1e6, tokens.size(), static_cast<long long>(o.steps),
              static_cast<long long>(o.batch), static_cast<long long>(o.seq), o.dtype.c_str(),
              o.device.c_str());

  Batches batches(std::move(tokens), o);
  std::vector<double> losses, seconds;
  bool terminal = isatty(STDOUT_FILENO);
  for (int64_t i = 0; i < o.steps; ++i) {
    std::vector<int64_t> ids = batches.next(), labels = labels_of(ids, o.seq);
    auto start = std::chrono::steady_clock::now();
    auto ctx = memory.context();
    losses.push_back(model.step(*ctx, ids, labels));
    optimizer.step(*ctx, i, o.lr * learning_rate(i, o.steps));
    ctx.reset();
    memory.wait();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    bool last = i + 1 == o.steps;
    if (terminal || last || i % std::max<int64_t>(1, o.steps / 10) == 0) {
      std::printf("%sstep %lld of %lld: loss %.4f, %.0f tokens/s%s", terminal ? "\r" : "",
                  static_cast<long long>(i + 1), static_cast<long long>(o.steps), losses.back(),
                  double(o.batch * o.seq) / seconds.back(), terminal && !last ? "   " : "\n");
      std::fflush(stdout);
    }
  }
  files::json result = {{"losses", losses}, {"seconds", seconds}, {"parameters", size}};
  files::write_file(files::fs::path(o.out) / "train.json", result.dump(1) + "\n");
  save(model, config, o, memory);
  return std::all_of(losses.begin(), losses.end(), [](double x) { return std::isfinite(x); }) ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(parse(count, words));
  } catch (const std::exception& e) {  // tigon::Error: which op, which argument, expected, given
    std::fprintf(stderr, "train_llama: %s\n", e.what());
    return 2;
  }
}
