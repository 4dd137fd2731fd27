// Embedding, RMS norm and gated activation on 16 lanes; a task is one token.
//
// Include after simd_<isa>.h. Anonymous namespace: see numerics.h.
#pragma once

#include "kernels.h"
#include "numerics.h"

namespace caudal {
namespace {

inline float half_at(const std::byte* p, int64_t index) {
  return half_to_float(reinterpret_cast<const uint16_t*>(p)[index]);
}

// 32 values of row `r` (0 … 15) of a packed block; see PackedMatrix for the layouts.
inline void unpack_w4(const std::byte* block, int64_t r, float* out) {
  const float d = half_at(block + 256, r);
  const float m = half_at(block + 288, r);
  const auto* bytes = reinterpret_cast<const uint8_t*>(block);
  for (int k = 0; k < 16; ++k) {
    const int byte = bytes[64 * (k / 4) + 4 * r + k % 4];
    out[k] = __builtin_fmaf(static_cast<float>(byte & 15), d, m);
    out[16 + k] = __builtin_fmaf(static_cast<float>(byte >> 4), d, m);
  }
}

inline void unpack_w8(const std::byte* block, int64_t r, float* out) {
  const float d = half_at(block + 512, r);
  const auto* bytes = reinterpret_cast<const int8_t*>(block);
  for (int k = 0; k < 32; ++k) {
    out[k] = static_cast<float>(bytes[32 * (k / 2) + 2 * r + k % 2]) * d;
  }
}

inline void unpack_f16(const std::byte* block, int64_t r, float* out) {
  uint16_t halves[32];
  for (int k = 0; k < 32; ++k) halves[k] = reinterpret_cast<const uint16_t*>(block)[16 * k + r];
  const auto* bytes = reinterpret_cast<const std::byte*>(halves);
  F32::load_half(bytes).store(out);
  F32::load_half(bytes + 32).store(out + 16);
}

inline void unpack_f32(const std::byte* block, int64_t r, float* out) {
  for (int k = 0; k < 32; ++k) out[k] = reinterpret_cast<const float*>(block)[16 * k + r];
}

inline void unpack_row(const PackedMatrix& table, int64_t row, float* out) {
  static constexpr void (*kUnpack[])(const std::byte*, int64_t, float*) = {unpack_w4, unpack_w8,
                                                                          unpack_f16, unpack_f32};
  static constexpr int64_t kBlockBytes[] = {320, 544, 1024, 2048};
  const auto format = static_cast<int>(table.format);
  const int64_t num_blocks = table.cols / 32;
  const std::byte* block = table.data + row / 16 * num_blocks * kBlockBytes[format];
  for (int64_t b = 0; b < num_blocks; ++b, block += kBlockBytes[format]) {
    kUnpack[format](block, row % 16, out + 32 * b);
  }
}

// Calls op(first column, number of columns up to 16) over a row.
template <class Op>
inline void for_lanes(int64_t cols, Op op) {
  int64_t k = 0;
  for (; k + 16 <= cols; k += 16) op(k, 16);
  if (k < cols) op(k, static_cast<int>(cols - k));
}

inline F32 load_first(const float* p, int count) {
  if (count == 16) return F32::load(p);
  float lanes[16] = {};
  for (int i = 0; i < count; ++i) lanes[i] = p[i];
  return F32::load(lanes);
}

inline void store_first(F32 x, float* p, int count) {
  if (count == 16) return x.store(p);
  float lanes[16];
  x.store(lanes);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

inline void embed_tokens(const EmbedArgs& args, Worker& worker) {
  for (int64_t t = next_task(worker); t < args.batch->num_tokens; t = next_task(worker)) {
    unpack_row(args.table, args.batch->input_ids[t], args.out + t * args.out_stride);
  }
}

inline void rms_norm_tokens(const RmsNormArgs& args, Worker& worker) {
  const int64_t cols = args.cols;
  for (int64_t t = next_task(worker); t < args.num_tokens; t = next_task(worker)) {
    const float* x = args.x + t * args.x_stride;
    float* out = args.out + t * args.out_stride;
    F32 sum = F32::zero();
    for_lanes(cols, [&](int64_t k, int count) {
      const F32 v = load_first(x + k, count);
      sum = F32::fma(v, v, sum);
    });
    const float mean = sum.sum_lanes() / static_cast<float>(cols);
    const F32 inverse = F32::set1(1.0f / __builtin_sqrtf(mean + args.eps));
    for_lanes(cols, [&](int64_t k, int count) {
      const F32 scaled = load_first(x + k, count) * inverse;
      store_first(scaled * load_first(args.weight + k, count), out + k, count);
    });
  }
}

inline void silu_mul_tokens(const SiluMulArgs& args, Worker& worker) {
  const int64_t cols = args.cols;
  for (int64_t t = next_task(worker); t < args.num_tokens; t = next_task(worker)) {
    const float* gate = args.gate_up + t * 2 * cols;
    float* out = args.out + t * cols;
    for_lanes(cols, [&](int64_t k, int count) {
      const F32 value =
          silu_mul_approx(load_first(gate + k, count), load_first(gate + cols + k, count));
      store_first(value, out + k, count);
    });
  }
}

}  // namespace
}  // namespace caudal
