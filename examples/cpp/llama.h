// A Llama on Tigon's C++ library: parameters, one training step's forward and backward, on the CPU or a GPU.
// Attention is composed of matmuls and softmax over blocks of rows of one head; nothing has T x T
// elements per head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "files.h"
#include "tigon/base/make_context.h"
#include "tigon/ops/add_rms_norm/add_rms_norm.h"
#include "tigon/ops/embedding/embedding.h"
#include "tigon/ops/glu/glu.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/ops/rope/rope.h"
#include "tigon/ops/softmax/softmax.h"
#ifdef TRAIN_LLAMA_CUDA
#include <cuda_runtime_api.h>
#endif

namespace llama {

using files::fail;
using tigon::DType;
using tigon::Matrix;
using tigon::Vector;

// --- Memory of the device, and copies to and from it. ---

class Memory {
 public:
  Memory(bool cuda, int threads) : cuda_(cuda), threads_(threads) { owner_ = context(); }

  // For one step: the scratch memory of its calls lives as long as the context.
  std::unique_ptr<tigon::Context> context() const {
    return cuda_ ? tigon::make_cuda_context() : tigon::make_cpu_context(threads_);
  }
  Matrix matrix(DType t, int64_t rows, int64_t cols) {
    return {owner_->scratch(tigon::size_of(t) * size_t(rows * cols)), t, rows, cols, cols};
  }
  Vector vector(DType t, int64_t n) { return {matrix(t, 1, n).data, t, n}; }
  // rows x bytes, whose rows lie `to_stride` and `from_stride` bytes apart; either side may be the device's.
  void copy(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes, int64_t rows) {
#ifdef TRAIN_LLAMA_CUDA
    if (cuda_) {
      cudaError_t code =
          cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, size_t(rows), cudaMemcpyDefault);
      if (code != cudaSuccess) fail(std::string("copy: ") + cudaGetErrorString(code));
      return;
    }
#endif
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<char*>(to) + size_t(r) * to_stride,
                  static_cast<const char*>(from) + size_t(r) * from_stride, bytes);
  }
  void upload(void* to, const void* from, size_t bytes) {
    copy(to, bytes, from, bytes, bytes, 1);
    wait();  // `from` may be gone afterwards
  }
  void download(void* to, const void* from, size_t bytes) {
    copy(to, bytes, from, bytes, bytes, 1);
    wait();
  }
  void wait() {
#ifdef TRAIN_LLAMA_CUDA
    if (cuda_ && cudaDeviceSynchronize() != cudaSuccess) fail("the device failed");
#endif
  }

 private:
  bool cuda_;
  int threads_;
  std::unique_ptr<tigon::Context> owner_;  // its scratch is the memory of the whole run
};

// --- Views and matmuls. ---

// Part of a matrix.
inline Matrix block(const Matrix& m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  char* data = static_cast<char*>(m.data) + tigon::size_of(m.dtype) * size_t(row * m.stride + col);
  return {data, m.dtype, rows, cols, m.stride};
}
inline Matrix columns(const Matrix& m, int64_t col, int64_t cols) { return block(m, 0, m.rows, col, cols); }
inline Vector flat(const Matrix& m) { return {m.data, m.dtype, m.rows * m.cols}; }

struct MatmulOptions {
  bool trans_a = false, trans_b = false;
  float alpha = 1.0f;
  bool add = false;  // to what c holds
};
inline void matmul(tigon::Context& ctx, const Matrix& a, const Matrix& b, const Matrix& c,
                   const MatmulOptions& p) {
  ctx.gemm({.m = c.rows,
            .n = c.cols,
            .k = p.trans_a ? a.rows : a.cols,
            .a = a.data,
            .lda = a.stride,
            .trans_a = p.trans_a,
            .b = b.data,
            .ldb = b.stride,
            .trans_b = p.trans_b,
            .c = c.data,
            .ldc = c.stride,
            .ab_dtype = a.dtype,
            .c_dtype = c.dtype,
            .alpha = p.alpha,
            .beta = p.add ? 1.0f : 0.0f});
}
// y = x W^T;  dx = dy W and dW = dy^T x
inline void linear(tigon::Context& ctx, const Matrix& x, const Matrix& weight, const Matrix& y) {
  matmul(ctx, x, weight, y, {.trans_b = true});
}
inline void linear_backward(tigon::Context& ctx, const Matrix& dy, const Matrix& x, const Matrix& weight,
                            const Matrix& dx, const Matrix& dweight) {
  matmul(ctx, dy, x, dweight, {.trans_a = true});
  matmul(ctx, dy, weight, dx, {});
}

// --- The model. ---

// A parameter. Where it holds several of the checkpoint's tensors, they are its rows, one after the other.
struct Parameter {
  struct Part {
    std::string name;
    int64_t rows;
  };
  std::vector<Part> parts;
  Matrix value, gradient, exp_avg, exp_avg_sq;
  bool norm = false;  // one row, of ones at the start
};

struct Layer {
  Parameter input_norm, qkv, output, post_norm, gate_up, down;
  // Of the forward, for the backward.
  Matrix h_input, normed_input, projected, attended, h_post, normed_post, gates, activated;
  Vector input_rstd, post_rstd;
};

class Llama {
 public:
  Llama(const files::Config& c, DType dtype, int64_t batch, int64_t seq, Memory& memory)
      : c_(c), dtype_(dtype), batch_(batch), seq_(seq), rows_(batch * seq), memory_(memory) {
    q_ = c.heads * c.head_dim, kv_ = c.kv_heads * c.head_dim;
    embedding_ = parameter({{"model.embed_tokens.weight", c.vocab}}, c.hidden);
    layers_.resize(size_t(c.layers));
    for (size_t i = 0; i < layers_.size(); ++i)
      make_layer(layers_[i], "model.layers." + std::to_string(i) + ".");
    norm_ = parameter({{"model.norm.weight", 1}}, c.hidden, true);
    if (!c.tied) head_ = parameter({{"lm_head.weight", c.vocab}}, c.hidden);
    make_activations();
    make_tables();
  }

  // All parameters, in the order of the layers.
  std::vector<Parameter*> parameters() {
    std::vector<Parameter*> all{&embedding_};
    for (Layer& l : layers_)
      for (Parameter* p : {&l.input_norm, &l.qkv, &l.output, &l.post_norm, &l.gate_up, &l.down})
        all.push_back(p);
    all.push_back(&norm_);
    if (!c_.tied) all.push_back(&head_);
    return all;
  }

  // Loss of the batch, and all gradients. ids and labels are on the host.
  float step(tigon::Context& ctx, const std::vector<int64_t>& ids, const std::vector<int64_t>& labels) {
    memory_.upload(ids_.data, ids.data(), ids.size() * sizeof(int64_t));
    memory_.upload(labels_.data, labels.data(), labels.size() * sizeof(int64_t));
    forward(ctx);
    loss(ctx, std::count_if(labels.begin(), labels.end(), [](int64_t l) { return l >= 0; }));
    backward(ctx);
    float total = 0;
    memory_.download(&total, total_.data, sizeof total);
    return total;
  }

 private:
  Parameter parameter(std::vector<Parameter::Part> parts, int64_t cols, bool norm = false) {
    int64_t rows = 0;
    for (const auto& part : parts) rows += part.rows;
    auto make = [&] { return memory_.matrix(dtype_, rows, cols); };
    return {std::move(parts), make(), make(), make(), make(), norm};
  }
  Matrix rows_of(int64_t cols) { return memory_.matrix(dtype_, rows_, cols); }

  void make_layer(Layer& l, const std::string& prefix) {
    std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    l.input_norm = parameter({{prefix + "input_layernorm.weight", 1}}, c_.hidden, true);
    l.qkv = parameter({{attention + "q_proj.weight", q_},
                       {attention + "k_proj.weight", kv_},
                       {attention + "v_proj.weight", kv_}},
                      c_.hidden);
    l.output = parameter({{attention + "o_proj.weight", c_.hidden}}, q_);
    l.post_norm = parameter({{prefix + "post_attention_layernorm.weight", 1}}, c_.hidden, true);
    l.gate_up = parameter(
        {{mlp + "gate_proj.weight", c_.intermediate}, {mlp + "up_proj.weight", c_.intermediate}}, c_.hidden);
    l.down = parameter({{mlp + "down_proj.weight", c_.hidden}}, c_.intermediate);
  }
  void make_activations() {
    for (Layer& l : layers_) {
      for (Matrix* m : {&l.h_input, &l.normed_input, &l.h_post, &l.normed_post}) *m = rows_of(c_.hidden);
      l.projected = rows_of(q_ + 2 * kv_), l.attended = rows_of(q_);
      l.gates = rows_of(2 * c_.intermediate), l.activated = rows_of(c_.intermediate);
      l.input_rstd = memory_.vector(DType::f32, rows_), l.post_rstd = memory_.vector(DType::f32, rows_);
    }
    for (Matrix* m : {&branch_, &h_, &normed_, &dnormed_, &dh_}) *m = rows_of(c_.hidden);
    dprojected_ = rows_of(q_ + 2 * kv_), dattended_ = rows_of(q_), dactivated_ = rows_of(c_.intermediate);
    rstd_ = memory_.vector(DType::f32, rows_), loss_ = memory_.vector(DType::f32, rows_);
    total_ = memory_.vector(DType::f32, 1), scale_ = memory_.vector(DType::f32, 1),
    one_ = memory_.vector(DType::f32, 1);
    ids_ = memory_.vector(DType::i64, rows_), labels_ = memory_.vector(DType::i64, rows_);
    dhead_ = memory_.matrix(DType::f32, c_.vocab, c_.hidden);
    if (c_.tied) {
      for (Matrix* m : {&dtied_, &unused_}) *m = memory_.matrix(dtype_, c_.vocab, c_.hidden);
    }
    float one = 1;
    memory_.upload(one_.data, &one, sizeof one);
  }
  // cos and sin of the positions, and the mask of a block of rows: its last columns are a triangle.
  void make_tables() {
    int64_t half = c_.head_dim / 2;
    std::vector<float> cosine(size_t(seq_ * half)), sine(cosine.size());
    for (int64_t t = 0; t < seq_; ++t)
      for (int64_t i = 0; i < half; ++i) {
        float angle = float(t) * (1.0f / std::pow(c_.theta, float(2 * i) / float(c_.head_dim)));
        cosine[size_t(t * half + i)] = std::cos(angle), sine[size_t(t * half + i)] = std::sin(angle);
      }
    cos_ = memory_.matrix(DType::f32, seq_, half), sin_ = memory_.matrix(DType::f32, seq_, half);
    memory_.upload(cos_.data, cosine.data(), cosine.size() * sizeof(float));
    memory_.upload(sin_.data, sine.data(), sine.size() * sizeof(float));

    block_ = std::min<int64_t>(seq_, 256);
    for (Matrix* m : {&mask_, &scores_, &dscores_}) *m = memory_.matrix(dtype_, block_, seq_);
    std::string mask(size_t(block_ * seq_) * tigon::size_of(dtype_), '\0');
    uint32_t minus_infinity = dtype_ == DType::f32 ? 0xff800000u : dtype_ == DType::bf16 ? 0xff80u : 0xfc00u;
    for (int64_t r = 0; r < block_; ++r)
      for (int64_t c = seq_ - block_ + r + 1; c < seq_; ++c)
        std::memcpy(&mask[size_t(r * seq_ + c) * tigon::size_of(dtype_)], &minus_infinity,
                    tigon::size_of(dtype_));
    memory_.upload(mask_.data, mask.data(), mask.size());
  }

  // --- Forward ---
  // y = rms_norm(h), h = branch + residual
  void add_norm(tigon::Context& ctx, const Matrix& branch, const Matrix& residual, const Parameter& weight,
                const Matrix& y, const Matrix& h, const Vector& rstd) {
    tigon::add_rms_norm_fwd(ctx, {.x = branch,
                                  .residual = residual,
                                  .weight = flat(weight.value),
                                  .y = y,
                                  .h = h,
                                  .rstd = rstd,
                                  .eps = c_.eps});
  }
  void forward(tigon::Context& ctx) {
    Matrix residual = layers_.front().h_input;
    tigon::embedding_fwd(ctx, {.ids = ids_, .weight = embedding_.value, .y = residual});
    for (Layer& l : layers_) {
      if (&l == &layers_.front())
        tigon::rms_norm_fwd(ctx, {.x = l.h_input,
                                  .weight = flat(l.input_norm.value),
                                  .y = l.normed_input,
                                  .rstd = l.input_rstd,
                                  .eps = c_.eps});
      else
        add_norm(ctx, branch_, residual, l.input_norm, l.normed_input, l.h_input, l.input_rstd);
      linear(ctx, l.normed_input, l.qkv.value, l.projected);
      tigon::rope_fwd(ctx, rotation(l.projected));
      attention(ctx, l);
      linear(ctx, l.attended, l.output.value, branch_);
      add_norm(ctx, branch_, l.h_input, l.post_norm, l.normed_post, l.h_post, l.post_rstd);
      linear(ctx, l.normed_post, l.gate_up.value, l.gates);
      tigon::glu_fwd(ctx, {.gate = gate(l.gates), .up = up(l.gates), .y = l.activated});
      linear(ctx, l.activated, l.down.value, branch_);
      residual = l.h_post;
    }
    add_norm(ctx, branch_, residual, norm_, normed_, h_, rstd_);
  }
  Matrix gate(const Matrix& gates) const { return columns(gates, 0, c_.intermediate); }
  Matrix up(const Matrix& gates) const { return columns(gates, c_.intermediate, c_.intermediate); }

  // q and k of all heads, turned in place.
  tigon::Rope rotation(const Matrix& projected) const {
    auto heads = [&](int64_t col, int64_t count) {
      Matrix m = columns(projected, col, count * c_.head_dim);
      return tigon::RopeHeads{.data = m.data,
                              .dtype = m.dtype,
                              .batch = batch_,
                              .heads = count,
                              .tokens = seq_,
                              .cols = c_.head_dim,
                              .batch_stride = seq_ * m.stride,
                              .head_stride = c_.head_dim,
                              .token_stride = m.stride};
    };
    auto table = [&](const Matrix& m) {
      return tigon::RopeTable{
          .data = m.data, .dtype = m.dtype, .tokens = seq_, .cols = m.cols, .token_stride = m.stride};
    };
    auto q = heads(0, c_.heads), k = heads(q_, c_.kv_heads);
    return {.q = q,
            .k = k,
            .cos = table(cos_),
            .sin = table(sin_),
            .q_out = q,
            .k_out = k,
            .form = {.shared = true}};
  }

  // Calls fn for each block of rows of each head: from the last to the first, so that what is summed over
  // blocks is written by one that has all columns. A block of rows ends in a triangle, behind which nothing
  // is seen.
  struct AttentionBlock {
    int64_t row, rows, cols;    // rows of the batch, of them in this block, columns that they see
    int64_t first, query, key;  // row of the sequence's first token; columns of q and of k
    bool sum;                   // something was written to the gradients of these keys before
  };
  template <class Fn>
  void each_block(const Fn& fn) const {
    int64_t group = c_.heads / c_.kv_heads;
    for (int64_t b = 0; b < batch_; ++b)
      for (int64_t head = 0; head < c_.heads; ++head)
        for (int64_t end = seq_; end > 0; end -= std::min(end, block_)) {
          int64_t rows = std::min(end, block_);
          fn(AttentionBlock{b * seq_ + end - rows, rows, end, b * seq_, head * c_.head_dim,
                            q_ + head / group * c_.head_dim, head % group != 0 || end != seq_});
        }
  }
  float attention_scale() const { return 1.0f / std::sqrt(float(c_.head_dim)); }
  // softmax(q k^T / sqrt(head_dim) + mask) of a block
  Matrix probabilities(tigon::Context& ctx, const Matrix& projected, const AttentionBlock& at) {
    Matrix p = block(scores_, 0, at.rows, 0, at.cols),
           m = block(mask_, block_ - at.rows, at.rows, seq_ - at.cols, at.cols);
    size_t size = tigon::size_of(dtype_);
    memory_.copy(p.data, size * size_t(p.stride), m.data, size * size_t(m.stride), size * size_t(p.cols),
                 p.rows);
    matmul(ctx, block(projected, at.row, at.rows, at.query, c_.head_dim),
           block(projected, at.first, at.cols, at.key, c_.head_dim), p,
           {.trans_b = true, .alpha = attention_scale(), .add = true});
    tigon::softmax_fwd(ctx, {.x = p, .y = p});
    return p;
  }
  void attention(tigon::Context& ctx, Layer& l) {
    each_block([&](const AttentionBlock& at) {
      Matrix p = probabilities(ctx, l.projected, at);
      matmul(ctx, p, block(l.projected, at.first, at.cols, at.key + kv_, c_.head_dim),
             block(l.attended, at.row, at.rows, at.query, c_.head_dim), {});
    });
  }

  // --- Loss, and the gradients of its operands ---
  void loss(tigon::Context& ctx, int64_t counted) {
    bool wide = dtype_ == DType::f32;
    const Parameter& head = c_.tied ? embedding_ : head_;
    const Matrix& gradient = c_.tied ? dtied_ : head.gradient;
    tigon::linear_cross_entropy(ctx, {.head = {.hidden = normed_,
                                               .weight = head.value,
                                               .dhidden = dnormed_,
                                               .dweight = wide ? gradient : dhead_},
                                      .labels = {.target = labels_, .valid_rows = counted},
                                      .reduction = {.total = total_, .scale = scale_},
                                      .results = {.loss = loss_}});
    if (!wide) tigon::loss_head_finish(ctx, {.in = dhead_, .dloss = one_, .out = gradient});
  }

  // --- Backward ---
  // dh becomes the gradient of both summands of h.
  void add_norm_backward(tigon::Context& ctx, const Matrix& dy, bool first, const Matrix& h,
                         Parameter& weight, const Vector& rstd) {
    tigon::add_rms_norm_bwd(ctx, {.dy = dy,
                                  .dh = first ? Matrix{} : dh_,
                                  .h = h,
                                  .weight = flat(weight.value),
                                  .rstd = rstd,
                                  .dx = dh_,
                                  .dweight = flat(weight.gradient)});
  }
  void backward(tigon::Context& ctx) {
    add_norm_backward(ctx, dnormed_, true, h_, norm_, rstd_);
    for (auto l = layers_.rbegin(); l != layers_.rend(); ++l) {
      linear_backward(ctx, dh_, l->activated, l->down.value, dactivated_, l->down.gradient);
      tigon::glu_bwd(ctx, {.dy = dactivated_,
                           .gate = gate(l->gates),
                           .up = up(l->gates),
                           .dgate = gate(l->gates),
                           .dup = up(l->gates)});
      linear_backward(ctx, l->gates, l->normed_post, l->gate_up.value, dnormed_, l->gate_up.gradient);
      add_norm_backward(ctx, dnormed_, false, l->h_post, l->post_norm, l->post_rstd);
      linear_backward(ctx, dh_, l->attended, l->output.value, dattended_, l->output.gradient);
      attention_backward(ctx, *l);
      tigon::rope_bwd(ctx, rotation(dprojected_));
      linear_backward(ctx, dprojected_, l->normed_input, l->qkv.value, dnormed_, l->qkv.gradient);
      add_norm_backward(ctx, dnormed_, false, l->h_input, l->input_norm, l->input_rstd);
    }
    tigon::embedding_bwd(ctx, {.ids = ids_, .dy = dh_, .dweight = embedding_.gradient});
    if (c_.tied)  // the sum of both uses; the norm of it is not used
      tigon::add_rms_norm_fwd(
          ctx, {.x = dtied_, .residual = embedding_.gradient, .y = unused_, .h = embedding_.gradient});
  }
  // Probabilities are computed again. Gradients of k and v are summed over blocks and heads in the model's
  // dtype.
  void attention_backward(tigon::Context& ctx, Layer& l) {
    each_block([&](const AttentionBlock& at) {
      int64_t d = c_.head_dim, value = at.key + kv_;
      auto rows = [&](const Matrix& m, int64_t col) { return block(m, at.row, at.rows, col, d); };
      auto seen = [&](const Matrix& m, int64_t col) { return block(m, at.first, at.cols, col, d); };
      Matrix p = probabilities(ctx, l.projected, at), dp = block(dscores_, 0, at.rows, 0, at.cols),
             dout = rows(dattended_, at.query);
      matmul(ctx, dout, seen(l.projected, value), dp, {.trans_b = true});
      matmul(ctx, p, dout, seen(dprojected_, value), {.trans_a = true, .add = at.sum});
      tigon::softmax_bwd(ctx, {.dy = dp, .y = p, .dx = dp});
      matmul(ctx, dp, seen(l.projected, at.key), rows(dprojected_, at.query), {.alpha = attention_scale()});
      matmul(ctx, dp, rows(l.projected, at.query), seen(dprojected_, at.key),
             {.trans_a = true, .alpha = attention_scale(), .add = at.sum});
    });
  }

  files::Config c_;
  DType dtype_;
  int64_t batch_, seq_, rows_, q_ = 0, kv_ = 0, block_ = 0;  // q_, kv_: columns of q, and of k and v
  Memory& memory_;
  Parameter embedding_, norm_, head_;
  std::vector<Layer> layers_;
  Matrix branch_, h_, normed_, dnormed_, dh_, dprojected_, dattended_, dactivated_, dhead_, dtied_, unused_;
  Matrix cos_, sin_, mask_, scores_, dscores_;
  Vector rstd_, loss_, total_, scale_, one_, ids_, labels_;
};

}  // namespace llama
