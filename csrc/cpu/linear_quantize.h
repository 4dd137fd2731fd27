// Activations to panels: norm or gate, then int8, 13 bits or float, a few blocks of a token at once.
//
// Include after simd_<isa>.h. The ISA's class Q provides
//   kBatch: blocks of 32 values whose scales are made together;  Magnitudes: one per block
//   Magnitudes max_magnitudes(const float* x, int count): see numerics.h
//   void write_int8(const PanelSlot&, const float* x, Magnitudes, int64_t block, int count)
//   void write_int12(…), write_int13(…): the same
#pragma once

#include "linear_driver.h"
#include "numerics.h"

namespace caudal {

// Where one token's values of a format go: those of block b start at values + b * stride. The
// scales of all tokens of the tile follow the values, then the scaled sums.
struct PanelSlot {
  std::byte* values;
  std::byte* scales;
  int64_t stride;
  int64_t num_tokens;
};

namespace {

inline PanelSlot panel_slot(const PanelSet& panels, int kind, int64_t token, int value_bytes) {
  const int64_t tile = tile_of(panels.tiling, token);
  const int64_t begin = tile_begin(panels.tiling, tile);
  const int64_t num_tokens = tile_begin(panels.tiling, tile + 1) - begin;
  std::byte* base = tile_panel(panels, kind, tile);
  return {base + (token - begin) * value_bytes,
          base + num_tokens * value_bytes + (token - begin) * 4, num_tokens * kPanelBytes[kind],
          num_tokens};
}

inline void put_float(std::byte* p, float value) { *reinterpret_cast<float*>(p) = value; }

inline void write_float(const PanelSlot& slot, const float* x, int64_t block, int count) {
  for (int i = 0; i < count; ++i) {
    auto* out = reinterpret_cast<float*>(slot.values + (block + i) * slot.stride);
    F32::load(x + 32 * i).store(out);
    F32::load(x + 32 * i + 16).store(out + 16);
  }
}

inline float vector_inverse_rms(const float* x, int64_t cols, float eps) {
  F32 sum = F32::zero();
  for (int64_t k = 0; k < cols; k += 16) {
    const F32 v = F32::load(x + k);
    sum = F32::fma(v, v, sum);
  }
  return 1.0f / __builtin_sqrtf(sum.sum_lanes() / static_cast<float>(cols) + eps);
}

// Values of `count` columns from k on after the prologue: `buffer`, or x itself without one.
inline const float* prepare_values(const LinearArgs& args, const float* x, float inverse, int64_t k,
                                   int count, float* buffer) {
  const int64_t cols = args.segments[0].cols;
  switch (args.prologue) {
    case Prologue::kNone:
    case Prologue::kPanels:  // nothing is quantised then
      return x + k;
    case Prologue::kRmsNorm:
      for (int i = 0; i < count; i += 16) {
        const F32 scaled = F32::load(x + k + i) * F32::set1(inverse);
        (scaled * F32::load(args.norm_weight + k + i)).store(buffer + i);
      }
      break;
    case Prologue::kSiluMul:
      for (int i = 0; i < count; i += 16) {
        silu_mul_approx(F32::load(x + k + i), F32::load(x + cols + k + i)).store(buffer + i);
      }
      break;
  }
  return buffer;
}

template <class Q>
void quantize_token(const LinearArgs& args, const PanelSet& panels, int64_t token) {
  const float* x = args.x + token * args.x_stride;
  const float inverse = args.prologue == Prologue::kRmsNorm
                            ? vector_inverse_rms(x, args.segments[0].cols, args.eps)
                            : 0.0f;
  const PanelSlot int8 = panel_slot(panels, kInt8Panel, token, 32);
  const PanelSlot int12 = panel_slot(panels, kInt12Panel, token, 64);
  const PanelSlot int13 = panel_slot(panels, kInt13Panel, token, 64);
  const PanelSlot floats = panel_slot(panels, kFloatPanel, token, 128);
  const bool has_int8 = panels.base[kInt8Panel] != nullptr;
  const bool has_int12 = panels.base[kInt12Panel] != nullptr;
  const bool has_int13 = panels.base[kInt13Panel] != nullptr;
  alignas(64) float buffer[Q::kBatch * kBlockCols];
  for (int64_t block = 0; block < panels.num_blocks; block += Q::kBatch) {
    const int count = static_cast<int>(min_of(Q::kBatch, panels.num_blocks - block));
    const float* values =
        prepare_values(args, x, inverse, block * kBlockCols, count * kBlockCols, buffer);
    if (panels.base[kFloatPanel]) write_float(floats, values, block, count);
    if (!has_int8 && !has_int12 && !has_int13) continue;
    const auto magnitudes = Q::max_magnitudes(values, count);
    if (has_int8) Q::write_int8(int8, values, magnitudes, block, count);
    if (has_int12) Q::write_int12(int12, values, magnitudes, block, count);
    if (has_int13) Q::write_int13(int13, values, magnitudes, block, count);
  }
}

}  // namespace
}  // namespace caudal
