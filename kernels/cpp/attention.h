// Attention of low-precision heads in fp32, one rounding per result: see ../wide.py. A head's keys and values are widened as they
// are packed for the products, and some rows of queries at a time are taken through all of them. For a few rows of queries, as
// in decoding, keys and values are read once, widened in registers, and no copy of them is written.
#pragma once

#include "cast_matmul.h"

namespace amp {

// Element (b, h, l, d) is number b * batch + h * head + l * row + d.
struct Heads {
  void* data;
  Type type;
  int64_t batch, head, row;
  explicit Heads(const Tensor& x)
      : data(const_cast<void*>(x.const_data_ptr())), type(x.scalar_type()), batch(x.stride(0)), head(x.stride(1)),
        row(x.stride(2)) {}
  void* at(int64_t b, int64_t h, int64_t l = 0) const { return advanced(data, type, b * batch + h * head + l * row); }
};

inline Tensor in_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Sizes: queries have `group` heads for each head of keys and values.
struct Attention {
  int64_t batches, key_heads, group, queries, keys, width;
  Attention(const Tensor& q, const Tensor& k)
      : batches(q.size(0)), key_heads(k.size(1)), group(q.size(1) / k.size(1)), queries(q.size(2)), keys(k.size(2)),
        width(q.size(3)) {}
};

// A mask in fp32, without copies of what is the same for all batches or heads.
inline std::optional<Tensor> wide_mask(const std::optional<Tensor>& mask) {
  if (!mask.has_value()) return mask;
  Tensor small = *mask;
  for (int64_t i = 0; i < small.dim(); ++i) {
    if (small.dim() == 4 && i < 2 && small.stride(i) == 0) small = small.narrow(i, 0, 1);
  }
  return small.to(at::kFloat);
}

// The strides of a mask that is expanded to these sizes; 0 for no mask.
inline std::array<int64_t, 4> mask_steps(const std::optional<Tensor>& mask, std::array<int64_t, 4> sizes) {
  std::array<int64_t, 4> steps{};
  for (int64_t d = 0; mask && d < mask->dim(); ++d) {
    const int64_t i = d + 4 - mask->dim();
    TORCH_CHECK(i >= 0 && (mask->size(d) == 1 || mask->size(d) == sizes[i]), "attention: a mask of ", mask->sizes(), " for ",
                sizes[1], " heads of ", sizes[2], " queries and ", sizes[3], " keys in ", sizes[0], " batches");
    steps[i] = mask->size(d) == 1 ? 0 : mask->stride(d);
  }
  return steps;
}

// A mask, with the strides of an expanded one.
struct Masked {
  const float* data;
  std::array<int64_t, 4> steps;
  const float* row(int64_t b, int64_t head, int64_t l) const {
    return data ? data + b * steps[0] + head * steps[1] + l * steps[2] : nullptr;
  }
};

// ------------------------------------------------------------------------------------------- a few rows of queries

constexpr int64_t A_FEW_QUERIES = 4;

inline void attend_few(const Attention& s, const Heads& q, const Heads& k, const Heads& v, const Masked& mask,
                       bool causal, float scale, const Heads& out, float* logs, int64_t b, int64_t h) {
  const int64_t rows = s.group * s.queries, heads = s.key_heads * s.group;
  float* queries = scratch(LEFT).take(rows * s.width);
  float* scores = scratch(RIGHT).take(rows * s.keys);
  float* sums = scratch(SUMS).take(rows * s.width);
  for (int64_t r = 0; r < rows; ++r) {
    widen(q.type, q.at(b, h * s.group + r / s.queries, r % s.queries), queries + r * s.width, s.width);
  }
  dot_columns(queries, Operand{k.at(b, h), k.row, true, k.type, k.type}, 0, scores, s.keys, s.keys, rows, s.width);
  float totals[16];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = h * s.group + r / s.queries, l = r % s.queries;
    const int64_t seen = causal ? std::min(l + 1, s.keys) : s.keys;
    const auto [most, total] = exponentials(scores + r * s.keys, mask.row(b, head, l), mask.steps[3], scale, seen);
    std::fill(scores + r * s.keys + seen, scores + (r + 1) * s.keys, 0.0f);
    totals[r] = total;
    logs[(b * s.queries + l) * heads + head] = total == 0.0f ? most : most + __builtin_logf(total);
  }
  std::fill(sums, sums + rows * s.width, 0.0f);
  add_rows(scores, Operand{v.at(b, h), v.row, false, v.type, v.type}, 0, sums, s.width, rows, s.keys);
  for (int64_t r = 0; r < rows; ++r) {
    const float share = totals[r] == 0.0f ? 0.0f : 1.0f / totals[r];
    for (int64_t d = 0; d < s.width; ++d) sums[r * s.width + d] *= share;
    finish(out.type, sums + r * s.width, out.at(b, h * s.group + r / s.queries, r % s.queries), s.width);
  }
}

// ------------------------------------------------------------------------------------------------------- many rows

constexpr int64_t SCORES = int64_t(1) << 16;  // fp32 values of scores that are held at a time

// How the rows of queries are taken: `height` of them at a time.
inline int64_t height_of(const Attention& s) {
  const int64_t most = std::max<int64_t>(std::min<int64_t>(SCORES / std::max<int64_t>(s.keys, 1) / 8, 16), 2) * 8;
  return std::min(most, std::max<int64_t>(s.queries, 1));
}

// What one head of keys needs for its queries, forward: scores = queries @ keys^T, results = scores @ values.
inline void attend(const Attention& s, const Heads& q, const Heads& k, const Heads& v, const Masked& mask, bool causal, float scale,
                   const Heads& out, float* logs, int64_t b, int64_t h, int64_t from, int64_t end) {
  Right keys(s.width, s.keys), values(s.keys, s.width);
  const int64_t height = height_of(s), wide = keys.width(), narrow = values.width();
  float* packed = scratch(RIGHT).take(keys.values() + values.values());
  keys.pack(Operand{k.at(b, h), k.row, true, k.type, k.type}, packed);
  values.pack(Operand{v.at(b, h), v.row, false, v.type, v.type}, packed + keys.values());
  float* queries = scratch(LEFT).take(height * s.width);
  float* scores = scratch(SUMS).take(height * (wide + narrow));
  float* sums = scores + height * wide;
  float totals[128];
  for (int64_t head = h * s.group; head < (h + 1) * s.group; ++head) {
    for (int64_t first = from; first < end; first += height) {
      const int64_t rows = std::min(height, end - first), most = causal ? std::min(first + rows, s.keys) : s.keys;
      widen(q.type, q.at(b, head, first), q.row, queries, s.width, rows, s.width);
      keys.multiply({queries, s.width, 1}, scores, wide, rows, s.width, most, false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t l = first + r, seen = causal ? std::min(l + 1, s.keys) : s.keys;
        float* row = scores + r * wide;
        const auto [greatest, total] = exponentials(row, mask.row(b, head, l), mask.steps[3], scale, seen);
        std::fill(row + seen, row + most, 0.0f);
        totals[r] = total;
        logs[(b * s.queries + l) * s.key_heads * s.group + head] = total == 0.0f ? greatest : greatest + __builtin_logf(total);
      }
      if (most == 0) std::fill(sums, sums + rows * narrow, 0.0f);
      values.multiply({scores, wide, 1}, sums, narrow, rows, most, s.width, false);
      for (int64_t r = 0; r < rows; ++r) {
        const float share = totals[r] == 0.0f ? 0.0f : 1.0f / totals[r];
        for (int64_t d = 0; d < s.width; ++d) sums[r * narrow + d] *= share;
      }
      finish(out.type, sums, narrow, nullptr, out.at(b, head, first), out.row, rows, s.width);
    }
  }
}

// The tensors of a backward.
struct Gradients {
  Heads g, q, k, v, o, grad_q, grad_k, grad_v;
  const float* logs;
  int64_t log_batch, log_head, log_row;
};

// The same, backward. With P the probabilities and G the gradient of the results: the gradient of values is P^T G, that of scores
// D = P * (G V^T - sum(G * O)), that of queries D K and that of keys D^T Q.
inline void attend_backward(const Attention& s, const Gradients& t, const Masked& mask, bool causal, float scale, int64_t b,
                            int64_t h) {
  Right keys(s.width, s.keys), values(s.width, s.keys), keys_again(s.keys, s.width);
  const int64_t height = height_of(s), wide = keys.width(), narrow = keys_again.width();
  float* packed = scratch(RIGHT).take(2 * keys.values() + keys_again.values());
  keys.pack(Operand{t.k.at(b, h), t.k.row, true, t.k.type, t.k.type}, packed);
  values.pack(Operand{t.v.at(b, h), t.v.row, true, t.v.type, t.v.type}, packed + keys.values());
  keys_again.pack(Operand{t.k.at(b, h), t.k.row, false, t.k.type, t.k.type}, packed + 2 * keys.values());
  float* queries = scratch(LEFT).take(3 * height * s.width + 2 * height * narrow);
  float* gradients = queries + height * s.width;
  float* results = gradients + height * s.width;
  float* panels = results + height * s.width;
  float* scores = scratch(SUMS).take(height * (2 * wide + narrow) + 2 * s.keys * narrow);
  float* slopes = scores + height * wide;
  float* sums = slopes + height * wide;
  float* of_keys = sums + height * narrow;
  float* of_values = of_keys + s.keys * narrow;
  std::fill(of_keys, of_values + s.keys * narrow, 0.0f);
  for (int64_t head = h * s.group; head < (h + 1) * s.group; ++head) {
    for (int64_t first = 0; first < s.queries; first += height) {
      const int64_t rows = std::min(height, s.queries - first), most = causal ? std::min(first + rows, s.keys) : s.keys;
      widen(t.q.type, t.q.at(b, head, first), t.q.row, queries, s.width, rows, s.width);
      widen(t.g.type, t.g.at(b, head, first), t.g.row, gradients, s.width, rows, s.width);
      widen(t.o.type, t.o.at(b, head, first), t.o.row, results, s.width, rows, s.width);
      keys.multiply({queries, s.width, 1}, scores, wide, rows, s.width, most, false);
      values.multiply({gradients, s.width, 1}, slopes, wide, rows, s.width, most, false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t l = first + r, seen = causal ? std::min(l + 1, s.keys) : s.keys;
        float *row = scores + r * wide, *slope = slopes + r * wide;
        attention_slopes(row, slope, mask.row(b, head, l), mask.steps[3], scale,
                         t.logs[b * t.log_batch + head * t.log_head + l * t.log_row], gradients + r * s.width,
                         results + r * s.width, s.width, seen);
        std::fill(row + seen, row + most, 0.0f);
        std::fill(slope + seen, slope + most, 0.0f);
      }
      Right some(rows, s.width);
      some.pack(Operand{gradients, s.width, false, at::kFloat, at::kFloat}, panels);
      some.multiply({scores, 1, wide}, of_values, narrow, most, rows, s.width, true);
      some.pack(Operand{queries, s.width, false, at::kFloat, at::kFloat}, panels);
      some.multiply({slopes, 1, wide}, of_keys, narrow, most, rows, s.width, true);
      if (most == 0) std::fill(sums, sums + rows * narrow, 0.0f);
      keys_again.multiply({slopes, wide, 1}, sums, narrow, rows, most, s.width, false);
      finish(t.grad_q.type, sums, narrow, nullptr, t.grad_q.at(b, head, first), t.grad_q.row, rows, s.width);
    }
  }
  finish(t.grad_k.type, of_keys, narrow, nullptr, t.grad_k.at(b, h), t.grad_k.row, s.keys, s.width);
  finish(t.grad_v.type, of_values, narrow, nullptr, t.grad_v.at(b, h), t.grad_v.row, s.keys, s.width);
}

// ----------------------------------------------------------------------------------------------------- the two ops

inline void check_low(Type dtype) {
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "attention in fp32 is for float16 and bfloat16, not ", dtype);
}

inline float scale_of(const Attention& s, std::optional<double> scale) {
  return static_cast<float>(scale.value_or(1.0 / __builtin_sqrt(static_cast<double>(s.width))));
}

inline std::tuple<Tensor, Tensor> attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
                                                bool causal, const std::optional<Tensor>& attn_mask,
                                                std::optional<double> scale) {
  check_low(query.scalar_type());
  TORCH_CHECK(dropout == 0.0, "attention in fp32 has no dropout");
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value);
  const Attention s(q, k);
  const std::optional<Tensor> wide = wide_mask(attn_mask);
  const Masked mask{wide ? wide->const_data_ptr<float>() : nullptr, mask_steps(wide, {s.batches, q.size(1), s.queries, s.keys})};
  const Tensor result = at::empty_like(q);
  const Tensor logs = at::empty({s.batches, s.queries, q.size(1)}, at::kFloat);
  float* to_logs = logs.mutable_data_ptr<float>();
  const Heads from_q(q), from_k(k), from_v(v), to(result);
  const float factor = scale_of(s, scale);
  const int64_t heads = s.batches * s.key_heads, work = s.keys * s.width * s.group * s.queries;
  if (s.queries <= A_FEW_QUERIES && s.group * s.queries <= A_FEW && s.keys > 0) {
    at::parallel_for(0, heads, std::max<int64_t>(GRAIN / (s.keys * s.width + 1), 1), [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        attend_few(s, from_q, from_k, from_v, mask, causal, factor, to, to_logs, i / s.key_heads, i % s.key_heads);
      }
    });
  } else if (heads > 0) {
    // With fewer heads than threads, each head's queries are divided.
    const int64_t pieces = std::min(blocks(at::get_num_threads(), heads), blocks(s.queries, height_of(s)));
    const int64_t share = pieces < 2 ? s.queries : blocks(s.queries, pieces);
    const int64_t number = std::max<int64_t>(pieces, 1);
    at::parallel_for(0, heads * number, std::max<int64_t>(ALONE / (work / number + 1), 1), [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t head = i / number, from = std::min(i % number * share, s.queries);
        attend(s, from_q, from_k, from_v, mask, causal, factor, to, to_logs, head / s.key_heads, head % s.key_heads, from,
               std::min(from + share, s.queries));
      }
      tidy();
    });
  }
  tidy();
  return {result, logs.transpose(1, 2)};
}

inline std::tuple<Tensor, Tensor, Tensor> attention_backward_cpu(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& logs, double dropout, bool causal, const std::optional<Tensor>& attn_mask, std::optional<double> scale) {
  const Type low = query.scalar_type();
  check_low(low);
  TORCH_CHECK(dropout == 0.0, "attention in fp32 has no dropout");
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value), g = in_rows(gradient.to(low)), o = in_rows(out.to(low));
  const Attention s(q, k);
  const std::optional<Tensor> wide = wide_mask(attn_mask);
  const Masked mask{wide ? wide->const_data_ptr<float>() : nullptr, mask_steps(wide, {s.batches, q.size(1), s.queries, s.keys})};
  const auto made = [&](int64_t length, int64_t number) {
    return at::empty({s.batches, length, number, s.width}, q.options()).transpose(1, 2);
  };
  const Tensor all_logs = logs.to(at::kFloat);
  const Tensor grad_q = made(s.queries, q.size(1)), grad_k = made(s.keys, s.key_heads), grad_v = made(s.keys, s.key_heads);
  const Gradients all{Heads(g), Heads(q), Heads(k), Heads(v), Heads(o), Heads(grad_q), Heads(grad_k), Heads(grad_v),
                      all_logs.const_data_ptr<float>(), all_logs.stride(0), all_logs.stride(1), all_logs.stride(2)};
  const float factor = scale_of(s, scale);
  const int64_t work = s.keys * s.width * s.group * s.queries;
  at::parallel_for(0, s.batches * s.key_heads, std::max<int64_t>(ALONE / (work + 1), 1), [&](int64_t i, int64_t end) {
    for (; i < end; ++i) attend_backward(s, all, mask, causal, factor, i / s.key_heads, i % s.key_heads);
    tidy();
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace amp
