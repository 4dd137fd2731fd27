// Activations to panels; the scales of 16 blocks share a register.
#include "../simd_avx512.h"
// After the vector type that it uses:
#include "../linear_quantize.h"
#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kBatch = 16;

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

// Scales, and scales times the sums of the blocks' values; `sums` is overwritten.
inline void write_scales(const PanelSlot& slot, const Scales& s, __m512i* sums, int64_t block,
                         int count) {
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

struct Quantizer {
  static constexpr int kBatch = avx512vnni::kBatch;

  static __m512i max_magnitudes(const float* x, int count) {
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

  static void write_int8(const PanelSlot& slot, const float* x, __m512i max_bits, int64_t block,
                         int count) {
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
    write_scales(slot, s, sums, block, count);
  }

  static void write_int12(const PanelSlot& slot, const float* x, __m512i max_bits, int64_t block,
                          int count) {
    const Scales s = make_scales(max_bits, kQuantMax12);
    const __m512i nibble = _mm512_set1_epi32(15);
    __m512i sums[kBatch];
    for (int i = 0; i < count; ++i) {
      const __m512i low = round_scaled(x + 32 * i, s, i);
      const __m512i high = round_scaled(x + 32 * i + 16, s, i);
      sums[i] = _mm512_add_epi32(low, high);
      auto* out = reinterpret_cast<__m128i*>(slot.values + (block + i) * slot.stride);
      _mm_storeu_si128(out, _mm512_cvtepi32_epi8(_mm512_srai_epi32(low, 4)));
      _mm_storeu_si128(out + 1, _mm512_cvtepi32_epi8(_mm512_srai_epi32(high, 4)));
      _mm_storeu_si128(out + 2, _mm512_cvtepi32_epi8(_mm512_and_si512(low, nibble)));
      _mm_storeu_si128(out + 3, _mm512_cvtepi32_epi8(_mm512_and_si512(high, nibble)));
    }
    write_scales(slot, s, sums, block, count);
  }

  static void write_int13(const PanelSlot& slot, const float* x, __m512i max_bits, int64_t block,
                          int count) {
    const Scales s = make_scales(max_bits, kQuantMax13);
    for (int i = 0; i < count; ++i) {
      auto* out = reinterpret_cast<__m256i*>(slot.values + (block + i) * slot.stride);
      _mm256_storeu_si256(out, _mm512_cvtepi32_epi16(round_scaled(x + 32 * i, s, i)));
      _mm256_storeu_si256(out + 1, _mm512_cvtepi32_epi16(round_scaled(x + 32 * i + 16, s, i)));
      put_float(slot.scales + (block + i) * slot.stride, s.d[i]);
    }
  }
};

}  // namespace

void quantize_tokens(const LinearArgs& args, const PanelSet& panels, int64_t token, int64_t count) {
  for (int64_t t = token; t < token + count; ++t) quantize_token<Quantizer>(args, panels, t);
}

}  // namespace caudal::avx512vnni
