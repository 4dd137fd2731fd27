// Rotary embedding: the table of a step, and the kernel that rotates q and k and fills the cache.
//
// Plain loops without fma, which every compiler target turns into the same arithmetic; what needs
// instructions of its own (half and int8 conversion) comes in through `Convert`:
//   static void to_half(const float* x, int n, uint16_t* out);
//   static float to_int8(const float* x, int n, int8_t* out);  // returns the scale
// n is a multiple of 16. Anonymous namespace: see numerics.h.
#pragma once

#include "kernels.h"
#include "numerics.h"

namespace caudal {
namespace {

constexpr int kMaxRopeHeadDim = 256;
constexpr float kMaxHalf = 65504.0f;

// Adding 1.5 * 2^52 rounds to an integer, which the low bits then hold.
constexpr double kRoundShift64 = 6755399441055744.0;

// sin and cos of `count` angles, absolute error below 1e-10 for |angle| up to 1.6e6: reduction by
// pi / 2 in three parts (the first has 33 bits, so that its products are exact), then Taylor
// series.
inline void make_table_row(double position, const float* inv_freq, int count, double factor,
                           float* __restrict cos_out, float* __restrict sin_out) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kPart1 = 1.57079632673412561417e+00;
  constexpr double kPart2 = 6.07710050630396597660e-11;
  constexpr double kPart3 = 2.02226624879595063154e-21;
  for (int i = 0; i < count; ++i) {
    const double angle = position * static_cast<double>(inv_freq[i]);
    const double shifted = angle * kTwoOverPi + kRoundShift64;
    const double n = shifted - kRoundShift64;
    const double r = ((angle - n * kPart1) - n * kPart2) - n * kPart3;
    const double z = r * r;
    double s = -1.0 / 39916800 * z + 1.0 / 362880;
    s = (s * z - 1.0 / 5040) * z + 1.0 / 120;
    s = ((s * z - 1.0 / 6) * z + 1.0) * r;
    double c = 1.0 / 479001600 * z - 1.0 / 3628800;
    c = (c * z + 1.0 / 40320) * z - 1.0 / 720;
    c = (c * z + 1.0 / 24) * z - 0.5;
    c = c * z + 1.0;
    const uint64_t quadrant = __builtin_bit_cast(uint64_t, shifted);
    const double sin_abs = quadrant & 1 ? c : s;
    const double cos_abs = quadrant & 1 ? s : c;
    const double sin_value = quadrant & 2 ? -sin_abs : sin_abs;
    const double cos_value = (quadrant + 1) & 2 ? -cos_abs : cos_abs;
    cos_out[i] = static_cast<float>(cos_value * factor);
    sin_out[i] = static_cast<float>(sin_value * factor);
  }
}

inline void run_rope_table(const RopeTableArgs& args, Worker& worker) {
  const int half = args.rope_dim / 2;
  for (int64_t t = next_task(worker); t < args.batch->num_tokens; t = next_task(worker)) {
    float* row = args.cos_sin + t * args.rope_dim;
    make_table_row(args.batch->positions[t], args.inv_freq, half, args.attention_factor, row,
                   row + half);
  }
}

// x * 1 / rms(x) * weight, summed as `inverse_rms` does.
inline void normalize_head(const float* __restrict x, const float* __restrict weight, int head_dim,
                           float eps, float* __restrict out) {
  float partial[16] = {};
  for (int d = 0; d < head_dim; d += 16) {
    for (int i = 0; i < 16; ++i) partial[i] = __builtin_fmaf(x[d + i], x[d + i], partial[i]);
  }
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) partial[i] += partial[i + step];
  }
  const float inverse = 1.0f / __builtin_sqrtf(partial[0] / static_cast<float>(head_dim) + eps);
  for (int d = 0; d < head_dim; ++d) out[d] = (x[d] * inverse) * weight[d];
}

// Rotates the first rope_dim values of a head and copies the rest. Pairs are (i, i + rope_dim / 2),
// or neighbours if interleaved.
inline void rotate_head(const float* __restrict x, const float* __restrict cos_sin, int head_dim,
                        int rope_dim, bool interleaved, float* __restrict out) {
  const int half = rope_dim / 2;
  const float* c = cos_sin;
  const float* s = cos_sin + half;
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      out[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
      out[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
    }
  } else {
    for (int i = 0; i < half; ++i) {
      out[i] = x[i] * c[i] - x[half + i] * s[i];
      out[half + i] = x[half + i] * c[i] + x[i] * s[i];
    }
  }
  for (int d = rope_dim; d < head_dim; ++d) out[d] = x[d];
}

// Halves beyond the range would become infinite and turn whole rows into NaN; they saturate. NaN
// stays, so that a broken row is still noticed.
inline void saturate(float* x, int n) {
  for (int i = 0; i < n; ++i) {
    const float low = x[i] < -kMaxHalf ? -kMaxHalf : x[i];
    x[i] = low > kMaxHalf ? kMaxHalf : low;
  }
}

template <class Convert>
inline void write_half(const KVLayer& kv, std::byte* block, int offset, float* k, float* v) {
  const int head_dim = kv.head_dim;
  auto* keys = reinterpret_cast<uint16_t*>(block);
  uint16_t* values = keys + int64_t{kBlockSize} * head_dim;
  uint16_t half[kMaxRopeHeadDim];
  saturate(k, head_dim);
  Convert::to_half(k, head_dim, half);
  for (int d = 0; d < head_dim; ++d) keys[d * kBlockSize + offset] = half[d];
  saturate(v, head_dim);
  Convert::to_half(v, head_dim, values + int64_t{offset} * head_dim);
}

// Single bytes only: another thread may write the other token of a pair at the same time.
template <class Convert>
inline void write_int8(const KVLayer& kv, std::byte* block, int offset, const float* k,
                       const float* v) {
  const int head_dim = kv.head_dim;
  auto* keys = reinterpret_cast<int8_t*>(block);
  int8_t* values = keys + int64_t{kBlockSize} * head_dim;
  auto* scales = reinterpret_cast<float*>(values + int64_t{kBlockSize} * head_dim);
  int8_t quant[kMaxRopeHeadDim];
  scales[offset] = Convert::to_int8(k, head_dim, quant);
  for (int d = 0; d < head_dim; ++d) keys[d / 2 * 2 * kBlockSize + 2 * offset + d % 2] = quant[d];
  scales[kBlockSize + offset] = Convert::to_int8(v, head_dim, quant);
  int8_t* pair = values + int64_t{offset / 2} * 2 * head_dim + offset % 2;
  for (int d = 0; d < head_dim; ++d) pair[2 * d] = quant[d];
}

// As operands of a tile: four dimensions of a key lie together, those of 16 tokens side by side; values
// likewise, with four tokens of a dimension together (single bytes, see above).
template <class Convert>
inline void write_int8_tiles(const KVLayer& kv, std::byte* block, int offset, const float* k,
                             const float* v) {
  const int head_dim = kv.head_dim;
  auto* keys = reinterpret_cast<int8_t*>(block);
  int8_t* values = keys + int64_t{kBlockSize} * head_dim;
  auto* scales = reinterpret_cast<float*>(values + int64_t{kBlockSize} * head_dim);
  int8_t quant[kMaxRopeHeadDim];
  scales[offset] = Convert::to_int8(k, head_dim, quant);
  for (int d = 0; d < head_dim; d += 4) {
    __builtin_memcpy(keys + d * kBlockSize + 4 * offset, quant + d, 4);
  }
  scales[kBlockSize + offset] = Convert::to_int8(v, head_dim, quant);
  int8_t* value = values + int64_t{offset / 4} * 4 * head_dim + offset % 4;
  for (int d = 0; d < head_dim; ++d) value[4 * d] = quant[d];
}

// As operands of a tile: pairs of a key's dimensions, those of 16 tokens side by side; of values, pairs
// of tokens of one dimension. A value is always finite, as it meets the zero weights of rows that do not
// see it: if one is not, the token's key is NaN instead.
inline void write_bf16_tiles(const KVLayer& kv, std::byte* block, int offset, const float* k,
                             const float* v) {
  const int head_dim = kv.head_dim;
  auto* keys = reinterpret_cast<uint16_t*>(block) + 2 * offset;
  uint16_t* values = reinterpret_cast<uint16_t*>(block) + int64_t{kBlockSize} * head_dim +
                     int64_t{offset / 2} * 2 * head_dim + offset % 2;
  constexpr uint16_t kExponent = 0x7f80;
  uint16_t key[kMaxRopeHeadDim];
  uint16_t value[kMaxRopeHeadDim];
  uint16_t is_broken = 0;
  for (int d = 0; d < head_dim; ++d) key[d] = float_to_bf16(k[d]);
  for (int d = 0; d < head_dim; ++d) {
    const uint16_t rounded = float_to_bf16(v[d]);
    const uint16_t mask = (rounded & kExponent) == kExponent ? 0xffff : 0;
    value[d] = static_cast<uint16_t>(rounded & ~mask);
    is_broken |= mask;
  }
  if (is_broken != 0) key[0] = 0x7fc0;
  for (int d = 0; d < head_dim; d += 2) __builtin_memcpy(keys + d * kBlockSize, key + d, 4);
  for (int d = 0; d < head_dim; ++d) values[2 * d] = value[d];
}

inline void rope_head(const RopeCacheArgs& args, const float* x, const float* norm,
                      const float* cos_sin, float* out) {
  const int head_dim = args.kv.head_dim;
  float normed[kMaxRopeHeadDim];
  if (norm) {
    normalize_head(x, norm, head_dim, args.eps, normed);
    x = normed;
  }
  rotate_head(x, cos_sin, head_dim, args.rope_dim, args.interleaved, out);
}

template <class Convert>
inline void rope_token(const RopeCacheArgs& args, int64_t token) {
  const KVLayer& kv = args.kv;
  const int head_dim = kv.head_dim;
  const float* cos_sin = args.cos_sin + token * args.rope_dim;
  const float* q = args.qkv + token * args.qkv_stride;
  float* q_out = args.q_out + token * args.num_heads * head_dim;
  for (int h = 0; h < args.num_heads; ++h) {
    rope_head(args, q + h * head_dim, args.q_norm, cos_sin, q_out + h * head_dim);
  }
  const int slot = args.batch->slot_mapping[token];
  if (slot < 0) return;
  const float* k = q + args.num_heads * head_dim;
  const float* v = k + kv.num_kv_heads * head_dim;
  std::byte* block = kv.base + slot / kBlockSize * kv.block_stride;
  for (int h = 0; h < kv.num_kv_heads; ++h, k += head_dim, v += head_dim) {
    alignas(64) float key[kMaxRopeHeadDim];
    alignas(64) float value[kMaxRopeHeadDim];
    rope_head(args, k, args.k_norm, cos_sin, key);
    std::byte* place = block + h * kv.head_stride;
    const int offset = slot % kBlockSize;
    switch (kv.format) {
      case KVFormat::kF16:
        __builtin_memcpy(value, v, static_cast<size_t>(head_dim) * sizeof(float));
        write_half<Convert>(kv, place, offset, key, value);
        break;
      case KVFormat::kInt8:
        write_int8<Convert>(kv, place, offset, key, v);
        break;
      case KVFormat::kInt8Tiles:
        write_int8_tiles<Convert>(kv, place, offset, key, v);
        break;
      case KVFormat::kBf16Tiles:
        write_bf16_tiles(kv, place, offset, key, v);
        break;
    }
  }
}

template <class Convert>
inline void run_rope_and_cache(const RopeCacheArgs& args, Worker& worker) {
  constexpr int64_t kMaxStep = 8;
  const int64_t num_tokens = args.batch->num_tokens;
  const int64_t fair = num_tokens / (int64_t{4} * worker.count);
  const int64_t step = fair < 1 ? 1 : fair > kMaxStep ? kMaxStep : fair;
  const int64_t num_tasks = (num_tokens + step - 1) / step;
  for (int64_t task = claim_task(worker, num_tasks); task >= 0;
       task = claim_task(worker, num_tasks)) {
    const int64_t t = task * step;
    const int64_t end = t + step < num_tokens ? t + step : num_tokens;
    for (int64_t i = t; i < end; ++i) rope_token<Convert>(args, i);
  }
}

}  // namespace
}  // namespace caudal
