// Activations to panels; the scales of 8 blocks share a register.
#include "linear_kernels.h"
// After the vector type that it uses:
#include "../linear_quantize.h"

namespace caudal::avx2 {
namespace {

constexpr int kBatch = 8;

struct Max {
  static __m256i apply(__m256i a, __m256i b) { return _mm256_max_epu32(a, b); }
};
struct Sum {
  static __m256i apply(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
};

// Lane i of the result combines all lanes of v[i]; v is overwritten.
template <class Op>
inline __m256i combine_lanes(__m256i* v) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = Op::apply(_mm256_permute2x128_si256(v[i], v[i + 4], 0x20),
                     _mm256_permute2x128_si256(v[i], v[i + 4], 0x31));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    v[i] = Op::apply(_mm256_unpacklo_epi64(v[i], v[i + 2]), _mm256_unpackhi_epi64(v[i], v[i + 2]));
  }
  const __m256 a = _mm256_castsi256_ps(v[0]);
  const __m256 b = _mm256_castsi256_ps(v[1]);
  const __m256i mixed = Op::apply(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                  _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
}

// Scales of 8 blocks, see quant_scale.
struct Scales {
  alignas(32) float d[kBatch];
  alignas(32) float inverse[kBatch];
  alignas(32) int32_t usable[kBatch];  // -1: the block is finite and not tiny
};

inline Scales make_scales(__m256i max_bits, float quant_max) {
  const __m256 absmax = _mm256_castsi256_ps(max_bits);
  const __m256 limit = _mm256_set1_ps(quant_max);
  const __m256 finite =
      _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), max_bits));
  const __m256 usable =
      _mm256_and_ps(finite, _mm256_cmp_ps(absmax, _mm256_set1_ps(kQuantMin), _CMP_GE_OQ));
  const __m256 d = _mm256_and_ps(usable, _mm256_div_ps(absmax, limit));
  Scales s;
  _mm256_store_ps(s.d, _mm256_blendv_ps(_mm256_set1_ps(__builtin_nanf("")), d, finite));
  _mm256_store_ps(s.inverse, _mm256_and_ps(usable, _mm256_div_ps(limit, absmax)));
  _mm256_store_si256(reinterpret_cast<__m256i*>(s.usable), _mm256_castps_si256(usable));
  return s;
}

inline __m256i round_scaled(const float* x, const Scales& s, int block) {
  const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(s.inverse[block]));
  return _mm256_and_si256(_mm256_cvtps_epi32(scaled), _mm256_set1_epi32(s.usable[block]));
}

// Scales, and scales times the sums of the blocks' values; `sums` is overwritten.
inline void write_scales(const PanelSlot& slot, const Scales& s, __m256i* sums, int64_t block,
                         int count) {
  for (int i = count; i < kBatch; ++i) sums[i] = _mm256_setzero_si256();
  alignas(32) float scaled_sums[kBatch];
  const __m256 total = _mm256_cvtepi32_ps(combine_lanes<Sum>(sums));
  _mm256_store_ps(scaled_sums, _mm256_mul_ps(_mm256_load_ps(s.d), total));
  for (int i = 0; i < count; ++i) {
    std::byte* out = slot.scales + (block + i) * slot.stride;
    put_float(out, s.d[i]);
    put_float(out + 4 * slot.num_tokens, scaled_sums[i]);
  }
}

// Narrows four registers of 8 values to 32 int8, in order.
inline __m256i pack_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

struct Quantizer {
  static constexpr int kBatch = avx2::kBatch;

  static __m256i max_magnitudes(const float* x, int count) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i v[kBatch];
    for (int i = 0; i < count; ++i) {
      v[i] = _mm256_setzero_si256();
      for (int j = 0; j < kBlockCols; j += 8) {
        const auto* p = reinterpret_cast<const __m256i*>(x + 32 * i + j);
        v[i] = _mm256_max_epu32(v[i], _mm256_and_si256(_mm256_loadu_si256(p), magnitude));
      }
    }
    for (int i = count; i < kBatch; ++i) v[i] = _mm256_setzero_si256();
    return combine_lanes<Max>(v);
  }

  static void write_int8(const PanelSlot& slot, const float* x, __m256i max_bits, int64_t block,
                         int count) {
    const Scales s = make_scales(max_bits, kQuantMax8);
    __m256i sums[kBatch];
    for (int i = 0; i < count; ++i) {
      const __m256i a = round_scaled(x + 32 * i, s, i);
      const __m256i b = round_scaled(x + 32 * i + 8, s, i);
      const __m256i c = round_scaled(x + 32 * i + 16, s, i);
      const __m256i d = round_scaled(x + 32 * i + 24, s, i);
      sums[i] = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
      auto* out = reinterpret_cast<__m256i*>(slot.values + (block + i) * slot.stride);
      _mm256_storeu_si256(out, pack_bytes(a, b, c, d));
    }
    write_scales(slot, s, sums, block, count);
  }

  static void write_int12(const PanelSlot& slot, const float* x, __m256i max_bits, int64_t block,
                          int count) {
    const Scales s = make_scales(max_bits, kQuantMax12);
    __m256i sums[kBatch];
    for (int i = 0; i < count; ++i) {
      __m256i q[4], high[4], low[4];
      for (int j = 0; j < 4; ++j) {
        q[j] = round_scaled(x + 32 * i + 8 * j, s, i);
        high[j] = _mm256_srai_epi32(q[j], 4);
        low[j] = _mm256_and_si256(q[j], _mm256_set1_epi32(15));
      }
      sums[i] = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
      auto* out = reinterpret_cast<__m256i*>(slot.values + (block + i) * slot.stride);
      _mm256_storeu_si256(out, pack_bytes(high[0], high[1], high[2], high[3]));
      _mm256_storeu_si256(out + 1, pack_bytes(low[0], low[1], low[2], low[3]));
    }
    write_scales(slot, s, sums, block, count);
  }

  static void write_int13(const PanelSlot& slot, const float* x, __m256i max_bits, int64_t block,
                          int count) {
    const Scales s = make_scales(max_bits, kQuantMax13);
    for (int i = 0; i < count; ++i) {
      auto* out = reinterpret_cast<__m256i*>(slot.values + (block + i) * slot.stride);
      for (int j = 0; j < 2; ++j) {
        const __m256i packed = _mm256_packs_epi32(round_scaled(x + 32 * i + 16 * j, s, i),
                                                  round_scaled(x + 32 * i + 16 * j + 8, s, i));
        _mm256_storeu_si256(out + j, _mm256_permute4x64_epi64(packed, 0xd8));
      }
      put_float(slot.scales + (block + i) * slot.stride, s.d[i]);
    }
  }
};

}  // namespace

void quantize_tokens(const LinearArgs& args, const PanelSet& panels, int64_t token, int64_t count) {
  for (int64_t t = token; t < token + count; ++t) quantize_token<Quantizer>(args, panels, t);
}

}  // namespace caudal::avx2
