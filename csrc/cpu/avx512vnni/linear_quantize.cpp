// Activations to panels: norm or gate, then int8, 13 bits or float, 16 blocks of one token at once.
#include "../numerics.h"
#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kBatch = 16;  // blocks whose scales share one register

struct F32x16 {
  __m512 v;
  static F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
  static F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static F32x16 round(F32x16 a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
  static F32x16 scale_exponent(F32x16 p, F32x16 n) {
    const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), shift))};
  }
  static F32x16 zero_if_less(F32x16 a, F32x16 b, F32x16 x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)};
  }
  friend F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
};

struct Max {
  static __m512i apply(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
};
struct Sum {
  static __m512i apply(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
};

// Lane i of the result combines all lanes of v[i]; v is overwritten.
template <class Op>
inline __m512i combine_lanes(__m512i* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    v[i] = Op::apply(_mm512_shuffle_i32x4(v[i], v[i + 8], 0x44),
                     _mm512_shuffle_i32x4(v[i], v[i + 8], 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = Op::apply(_mm512_shuffle_i32x4(v[i], v[i + 4], 0x88),
                     _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    v[i] = Op::apply(_mm512_unpacklo_epi64(v[i], v[i + 2]), _mm512_unpackhi_epi64(v[i], v[i + 2]));
  }
  const __m512 a = _mm512_castsi512_ps(v[0]);
  const __m512 b = _mm512_castsi512_ps(v[1]);
  const __m512i mixed = Op::apply(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                  _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_epi32(order, mixed);
}

// Scales of 16 blocks, see quant_scale.
struct Scales {
  alignas(64) float d[kBatch];
  alignas(64) float inverse[kBatch];
  uint32_t usable;  // bit i: block i is finite and not tiny
};

inline Scales make_scales(__m512i max_bits, float quant_max) {
  const __m512 absmax = _mm512_castsi512_ps(max_bits);
  const __m512 limit = _mm512_set1_ps(quant_max);
  const __mmask16 finite = _mm512_cmplt_epu32_mask(max_bits, _mm512_set1_epi32(0x7f800000));
  const __mmask16 usable =
      _mm512_mask_cmp_ps_mask(finite, absmax, _mm512_set1_ps(kQuantMin), _CMP_GE_OQ);
  const __m512 d = _mm512_maskz_div_ps(usable, absmax, limit);
  Scales s;
  _mm512_store_ps(s.d, _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_nanf("")), finite, d));
  _mm512_store_ps(s.inverse, _mm512_maskz_div_ps(usable, limit, absmax));
  s.usable = usable;
  return s;
}

inline __m512i round_scaled(const float* x, const Scales& s, int block) {
  const __mmask16 mask = static_cast<__mmask16>(0u - ((s.usable >> block) & 1u));
  return _mm512_maskz_cvtps_epi32(
      mask, _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(s.inverse[block])));
}

// Where one token's values of a format go: block b's at values + b * stride, and so on.
struct PanelSlot {
  std::byte* values;
  std::byte* scales;
  int64_t stride;
  int64_t num_tokens;
};

inline PanelSlot panel_slot(const PanelSet& panels, int format, int64_t token, int value_bytes) {
  const int64_t tile = tile_of(panels.tiling, token);
  const int64_t begin = tile_begin(panels.tiling, tile);
  const int64_t num_tokens = tile_begin(panels.tiling, tile + 1) - begin;
  std::byte* base = tile_panel(panels, format, tile);
  return {base + (token - begin) * value_bytes,
          base + num_tokens * value_bytes + (token - begin) * 4, num_tokens * kPanelBytes[format],
          num_tokens};
}

inline void put_float(std::byte* p, float value) { *reinterpret_cast<float*>(p) = value; }

void write_int8(const PanelSlot& slot, const float* x, __m512i max_bits, int64_t block, int count) {
  const Scales s = make_scales(max_bits, kQuantMax8);
  __m512i sums[kBatch];
  for (int i = 0; i < count; ++i) {
    const __m512i low = round_scaled(x + 32 * i, s, i);
    const __m512i high = round_scaled(x + 32 * i + 16, s, i);
    sums[i] = _mm512_add_epi32(low, high);
    auto* out = reinterpret_cast<__m128i*>(slot.values + (block + i) * slot.stride);
    _mm_storeu_si128(out, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(out + 1, _mm512_cvtepi32_epi8(high));
  }
  for (int i = count; i < kBatch; ++i) sums[i] = _mm512_setzero_si512();
  alignas(64) float scaled_sums[kBatch];
  const __m512 total = _mm512_cvtepi32_ps(combine_lanes<Sum>(sums));
  _mm512_store_ps(scaled_sums, _mm512_mul_ps(_mm512_load_ps(s.d), total));
  for (int i = 0; i < count; ++i) {
    std::byte* out = slot.scales + (block + i) * slot.stride;
    put_float(out, s.d[i]);
    put_float(out + 4 * slot.num_tokens, scaled_sums[i]);
  }
}

void write_int13(const PanelSlot& slot, const float* x, __m512i max_bits, int64_t block, int count) {
  const Scales s = make_scales(max_bits, kQuantMax13);
  for (int i = 0; i < count; ++i) {
    auto* out = reinterpret_cast<__m256i*>(slot.values + (block + i) * slot.stride);
    _mm256_storeu_si256(out, _mm512_cvtepi32_epi16(round_scaled(x + 32 * i, s, i)));
    _mm256_storeu_si256(out + 1, _mm512_cvtepi32_epi16(round_scaled(x + 32 * i + 16, s, i)));
    put_float(slot.scales + (block + i) * slot.stride, s.d[i]);
  }
}

void write_float(const PanelSlot& slot, const float* x, int64_t block, int count) {
  for (int i = 0; i < count; ++i) {
    auto* out = reinterpret_cast<float*>(slot.values + (block + i) * slot.stride);
    _mm512_storeu_ps(out, _mm512_loadu_ps(x + 32 * i));
    _mm512_storeu_ps(out + 16, _mm512_loadu_ps(x + 32 * i + 16));
  }
}

__m512i max_magnitudes(const float* x, int count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i v[kBatch];
  for (int i = 0; i < count; ++i) {
    const __m512i low = _mm512_loadu_si512(x + 32 * i);
    const __m512i high = _mm512_loadu_si512(x + 32 * i + 16);
    v[i] = _mm512_max_epu32(_mm512_and_si512(low, magnitude), _mm512_and_si512(high, magnitude));
  }
  for (int i = count; i < kBatch; ++i) v[i] = _mm512_setzero_si512();
  return combine_lanes<Max>(v);
}

// 1 / sqrt(mean of squares + eps) in the order that numerics.h prescribes.
float inverse_norm(const float* x, int64_t cols, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < cols; k += 16) {
    const __m512 v = _mm512_loadu_ps(x + k);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  const __m128 total = _mm_add_ss(pair, _mm_movehdup_ps(pair));
  const __m128 mean = _mm_div_ss(total, _mm_set_ss(static_cast<float>(cols)));
  const __m128 root = _mm_sqrt_ss(_mm_add_ss(mean, _mm_set_ss(eps)));
  return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(1.0f), root));
}

// Values of `count` columns after the prologue: `buffer`, or x itself where there is none.
const float* prepare(const LinearArgs& args, const float* x, float inverse, int64_t k, int count,
                     int64_t cols, float* buffer) {
  switch (args.prologue) {
    case Prologue::kNone:
      return x + k;
    case Prologue::kRmsNorm:
      for (int i = 0; i < count; i += 16) {
        const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + k + i), _mm512_set1_ps(inverse));
        _mm512_store_ps(buffer + i, _mm512_mul_ps(v, _mm512_loadu_ps(args.norm_weight + k + i)));
      }
      break;
    case Prologue::kSiluMul:
      for (int i = 0; i < count; i += 16) {
        const F32x16 gate = {_mm512_loadu_ps(x + k + i)};
        const F32x16 up = {_mm512_loadu_ps(x + cols + k + i)};
        _mm512_store_ps(buffer + i, silu_mul_approx(gate, up).v);
      }
      break;
  }
  return buffer;
}

void quantize_token(const LinearArgs& args, const PanelSet& panels, int64_t token) {
  constexpr int kInt8 = static_cast<int>(WeightFormat::kW4);
  constexpr int kInt13 = static_cast<int>(WeightFormat::kW8);
  constexpr int kFloat = static_cast<int>(WeightFormat::kF16);
  const int64_t cols = panels.num_blocks * kBlockCols;
  const float* x = args.x + token * args.x_stride;
  const float inverse =
      args.prologue == Prologue::kRmsNorm ? inverse_norm(x, cols, args.eps) : 0.0f;
  const PanelSlot int8 = panel_slot(panels, kInt8, token, 32);
  const PanelSlot int13 = panel_slot(panels, kInt13, token, 64);
  const PanelSlot floats = panel_slot(panels, kFloat, token, 128);
  alignas(64) float buffer[kBatch * kBlockCols];
  for (int64_t block = 0; block < panels.num_blocks; block += kBatch) {
    const int count = static_cast<int>(min_of(kBatch, panels.num_blocks - block));
    const float* values =
        prepare(args, x, inverse, block * kBlockCols, count * kBlockCols, cols, buffer);
    if (panels.base[kFloat]) write_float(floats, values, block, count);
    if (!panels.base[kInt8] && !panels.base[kInt13]) continue;
    const __m512i max_bits = max_magnitudes(values, count);
    if (panels.base[kInt8]) write_int8(int8, values, max_bits, block, count);
    if (panels.base[kInt13]) write_int13(int13, values, max_bits, block, count);
  }
}

}  // namespace

void quantize_tokens(const LinearArgs& args, const PanelSet& panels, int64_t token, int64_t count) {
  for (int64_t t = token; t < token + count; ++t) quantize_token(args, panels, t);
}

}  // namespace caudal::avx512vnni
