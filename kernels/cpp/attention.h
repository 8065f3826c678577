// Attention of low-precision heads in fp32, one rounding per result: see ../wide.py. Some heads at a time are widened into
// memory that stays in the cache, and torch's own fp32 kernel runs on them; nothing is widened as a whole. For a few rows
// of queries, as in decoding, keys and values are read once, widened in registers, and no copy of them is written.
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

// Some heads of keys in some batches.
struct Part {
  int64_t batch, batches, head, heads;
};

constexpr int64_t HEADS_HELD = int64_t(1) << 17;  // fp32 values of heads that are widened at a time, and results: half an L2

// Calls f for every part, in parallel. `values`: how many fp32 values one head of keys needs with its queries.
template <class F>
void in_parts(const Attention& s, int64_t values, const F& f) {
  const int64_t all = s.batches * s.key_heads;
  const int64_t fit = std::min(HEADS_HELD / std::max<int64_t>(values, 1), blocks(all, at::get_num_threads()));
  const int64_t heads = std::max<int64_t>(std::min(fit, s.key_heads), 1), batches = std::max<int64_t>(fit / s.key_heads, 1);
  const int64_t across = blocks(s.key_heads, heads), down = blocks(s.batches, batches);
  at::parallel_for(0, across * down, 1, [&](int64_t i, int64_t end) {
    const at::NoGradGuard no_grad;
    for (; i < end; ++i) {
      const int64_t batch = i / across * batches, head = i % across * heads;
      f(Part{batch, std::min(batches, s.batches - batch), head, std::min(heads, s.key_heads - head)});
    }
    tidy();
  });
}

// Whether the heads of a part are one stretch of memory: whole batches of a dense tensor whose outermost dimension they are.
inline bool in_one(const Tensor& x, const Part& part, int64_t group) {
  const int64_t values = x.size(1) * x.size(2) * x.size(3);
  return part.heads * group == x.size(1) && (x.size(0) == 1 || x.stride(0) == values) && x.is_non_overlapping_and_dense();
}

// The heads of a part, widened; `group`: how many of them there are for each head of keys.
inline Tensor widened_heads(const Tensor& x, const Part& part, int64_t group, float* to) {
  const Heads from(x);
  const int64_t number = part.heads * group, length = x.size(2), width = x.size(3);
  if (in_one(x, part, group)) {
    widen(from.type, from.at(part.batch, 0), to, part.batches * number * length * width);
    return at::from_blob(to, {part.batches, number, length, width}, x.strides(), at::kFloat);
  }
  float* next = to;
  for (int64_t b = part.batch; b < part.batch + part.batches; ++b) {
    for (int64_t h = part.head * group; h < part.head * group + number; ++h) {
      if (from.row == width) {
        widen(from.type, from.at(b, h), next, length * width);
      } else {
        widen(from.type, from.at(b, h), from.row, next, width, length, width);
      }
      next += length * width;
    }
  }
  return at::from_blob(to, {part.batches, number, length, width}, at::kFloat);
}

// Rounds the heads of a part to where they belong in `result`.
inline void round_heads(const Tensor& x, const Tensor& result, const Part& part, int64_t group) {
  const Heads from(x), to(result);
  const int64_t length = x.size(2), width = x.size(3);
  const bool alike = from.head == to.head && from.row == to.row && x.stride(3) == 1;
  if (alike && in_one(result, part, group) && in_one(x, part, group)) {
    return finish(to.type, static_cast<const float*>(from.data), to.at(part.batch, 0), x.numel());
  }
  for (int64_t b = 0; b < part.batches; ++b) {
    for (int64_t h = 0; h < part.heads * group; ++h) {
      finish(to.type, static_cast<const float*>(from.at(b, h)), from.row, nullptr,
             to.at(part.batch + b, part.head * group + h), to.row, length, width);
    }
  }
}

// A mask in fp32, without copies of what is the same for all batches or heads.
inline std::optional<Tensor> wide_mask(const std::optional<Tensor>& mask) {
  if (!mask.has_value()) return mask;
  Tensor small = *mask;
  for (int64_t i = 0; i < small.dim(); ++i) {
    if (small.dim() == 4 && i < 2 && small.stride(i) == 0) small = small.narrow(i, 0, 1);
  }
  return small.to(at::kFloat);
}

inline std::optional<Tensor> of_part(const std::optional<Tensor>& mask, const Part& part, int64_t group) {
  if (!mask.has_value() || mask->dim() < 4) return mask;
  Tensor some = mask->size(0) == 1 ? *mask : mask->narrow(0, part.batch, part.batches);
  return some.size(1) == 1 ? some : some.narrow(1, part.head * group, part.heads * group);
}

// The logarithms of a part's sums to where they belong: the heads of a row of queries side by side.
inline void copy_logs(const Tensor& x, float* to, int64_t heads, const Part& part, int64_t group) {
  const float* from = x.const_data_ptr<float>();
  const int64_t batch = x.stride(0), head = x.stride(1), row = x.stride(2), length = x.size(2);
  for (int64_t b = 0; b < part.batches; ++b) {
    for (int64_t l = 0; l < length; ++l) {
      float* row_to = to + ((part.batch + b) * length + l) * heads + part.head * group;
      for (int64_t h = 0; h < part.heads * group; ++h) row_to[h] = from[b * batch + h * head + l * row];
    }
  }
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

// ------------------------------------------------------------------------------------------- a few rows of queries

constexpr int64_t A_FEW_QUERIES = 4;

inline void attend_few(const Attention& s, const Heads& q, const Heads& k, const Heads& v, const float* mask,
                       const int64_t* steps, bool causal, float scale, const Heads& out, float* logs, int64_t b, int64_t h) {
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
    const float* masked = mask ? mask + b * steps[0] + head * steps[1] + l * steps[2] : nullptr;
    const auto [most, total] = exponentials(scores + r * s.keys, masked, steps[3], scale, seen);
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

// ----------------------------------------------------------------------------------------------------- the two ops

inline void check_low(Type dtype) {
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "attention in fp32 is for float16 and bfloat16, not ", dtype);
}

inline std::tuple<Tensor, Tensor> attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value, double dropout,
                                                bool causal, const std::optional<Tensor>& attn_mask,
                                                std::optional<double> scale) {
  check_low(query.scalar_type());
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value);
  const Attention s(q, k);
  const std::optional<Tensor> mask = wide_mask(attn_mask);
  const Tensor result = at::empty_like(q);
  const Tensor logs = at::empty({s.batches, s.queries, q.size(1)}, at::kFloat);
  float* to_logs = logs.mutable_data_ptr<float>();
  const Heads from_q(q), from_k(k), from_v(v), to(result);
  const int64_t per_key = s.keys * s.width, per_query = s.group * s.queries * s.width;
  if (s.queries <= A_FEW_QUERIES && s.group * s.queries <= A_FEW && dropout == 0.0 && s.keys > 0) {
    const std::array<int64_t, 4> steps = mask_steps(mask, {s.batches, q.size(1), s.queries, s.keys});
    const float* masked = mask ? mask->const_data_ptr<float>() : nullptr;
    const float factor = static_cast<float>(scale.value_or(1.0 / __builtin_sqrt(static_cast<double>(s.width))));
    at::parallel_for(0, s.batches * s.key_heads, std::max<int64_t>(GRAIN / (per_key + 1), 1), [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        attend_few(s, from_q, from_k, from_v, masked, steps.data(), causal, factor, to, to_logs, i / s.key_heads,
                   i % s.key_heads);
      }
    });
  } else {
    in_parts(s, 2 * (per_query + per_key), [&](const Part& part) {
      const int64_t number = part.batches * part.heads;
      float* held = scratch(LEFT).take(number * (per_query + 2 * per_key));
      const Tensor wide_q = widened_heads(q, part, s.group, held);
      const Tensor wide_k = widened_heads(k, part, 1, held + number * per_query);
      const Tensor wide_v = widened_heads(v, part, 1, held + number * (per_query + per_key));
      const auto [some, log] = at::_scaled_dot_product_flash_attention_for_cpu(wide_q, wide_k, wide_v, dropout, causal,
                                                                              of_part(mask, part, s.group), scale);
      round_heads(some, result, part, s.group);
      copy_logs(log, to_logs, q.size(1), part, s.group);
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
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value), g = in_rows(gradient.to(low)), o = in_rows(out.to(low));
  const Attention s(q, k);
  const std::optional<Tensor> mask = wide_mask(attn_mask);
  const auto made = [&](int64_t length, int64_t number) {
    return at::empty({s.batches, length, number, s.width}, q.options()).transpose(1, 2);
  };
  const Tensor all_logs = logs.to(at::kFloat);
  const Tensor grad_q = made(s.queries, q.size(1)), grad_k = made(s.keys, s.key_heads), grad_v = made(s.keys, s.key_heads);
  const int64_t per_key = s.keys * s.width, per_query = s.group * s.queries * s.width;
  in_parts(s, 4 * (per_query + per_key), [&](const Part& part) {
    const int64_t number = part.batches * part.heads;
    float* next = scratch(LEFT).take(number * (3 * per_query + 2 * per_key));
    const auto widened_queries = [&](const Tensor& x) {
      const Tensor wide = widened_heads(x, part, s.group, next);
      next += number * per_query;
      return wide;
    };
    const auto widened_keys = [&](const Tensor& x) {
      const Tensor wide = widened_heads(x, part, 1, next);
      next += number * per_key;
      return wide;
    };
    const Tensor wide_g = widened_queries(g), wide_q = widened_queries(q), wide_o = widened_queries(o);
    const Tensor wide_k = widened_keys(k), wide_v = widened_keys(v);
    const Tensor log = all_logs.narrow(0, part.batch, part.batches).narrow(1, part.head * s.group, part.heads * s.group);
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        wide_g, wide_q, wide_k, wide_v, wide_o, log, dropout, causal, of_part(mask, part, s.group), scale);
    round_heads(dq, grad_q, part, s.group);
    round_heads(dk, grad_k, part, 1);
    round_heads(dv, grad_v, part, 1);
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace amp
