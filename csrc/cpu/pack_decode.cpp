#include "pack_decode.h"

#include <cmath>
#include <cstring>

#include "numerics.h"

namespace caudal {
namespace {

uint16_t load_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

void decode_q4_0(const uint8_t* row, int64_t block, BlockW4& out) {
  const uint8_t* p = row + block * 18;
  out.d = load_u16(p);
  out.m = float_to_half(-8.0f * half_to_float(out.d));
  std::memcpy(out.q, p + 2, 16);
}

void decode_q4_1(const uint8_t* row, int64_t block, BlockW4& out) {
  const uint8_t* p = row + block * 20;
  out.d = load_u16(p);
  out.m = load_u16(p + 2);
  std::memcpy(out.q, p + 4, 16);
}

// Six-bit scale and minimum of sub-block `i` (0 … 7) of Q4_K and Q5_K; `p` is the super-block.
struct KScale {
  float d;
  float m;
};

KScale k_scale(const uint8_t* p, int i) {
  const uint8_t* s = p + 4;
  int scale, minimum;
  if (i < 4) {
    scale = s[i] & 63;
    minimum = s[4 + i] & 63;
  } else {
    scale = (s[4 + i] & 15) | ((s[i - 4] >> 6) << 4);
    minimum = (s[4 + i] >> 4) | ((s[i] >> 6) << 4);
  }
  return {load_half(p) * static_cast<float>(scale), load_half(p + 2) * static_cast<float>(minimum)};
}

void decode_q4_k(const uint8_t* row, int64_t block, BlockW4& out) {
  const uint8_t* p = row + block / 8 * 144;
  const int i = static_cast<int>(block % 8);
  const KScale scale = k_scale(p, i);
  out.d = float_to_half(scale.d);
  out.m = float_to_half(-scale.m);
  const uint8_t* q = p + 16 + i / 2 * 32;
  const int shift = i % 2 * 4;
  for (int j = 0; j < 16; ++j) {
    out.q[j] = static_cast<uint8_t>(((q[j] >> shift) & 15) | (((q[j + 16] >> shift) & 15) << 4));
  }
}

// Values 0 … 31 of Q5_0 and Q5_1: nibbles and a word of fifth bits.
void q5_values(const uint8_t* high_bits, const uint8_t* nibbles, int8_t* out) {
  uint32_t high;
  std::memcpy(&high, high_bits, 4);
  for (int j = 0; j < 16; ++j) {
    out[j] = static_cast<int8_t>((nibbles[j] & 15) | (((high >> j) & 1) << 4));
    out[j + 16] = static_cast<int8_t>((nibbles[j] >> 4) | (((high >> (j + 16)) & 1) << 4));
  }
}

void decode_q5_0(const uint8_t* row, int64_t block, BlockW8& out) {
  const uint8_t* p = row + block * 22;
  out.d = load_u16(p);
  q5_values(p + 2, p + 6, out.q);
  for (int8_t& q : out.q) q = static_cast<int8_t>(q - 16);
}

void decode_q8_0(const uint8_t* row, int64_t block, BlockW8& out) {
  const uint8_t* p = row + block * 34;
  out.d = load_u16(p);
  std::memcpy(out.q, p + 2, 32);
}

// Quantise 32 values anew. Divides by the scale as it is stored, so that rounding the scale does
// not bias the values.
void requantise(const float* x, BlockW8& out) {
  float largest = 0.0f;
  bool has_nan = false;
  for (int k = 0; k < 32; ++k) {
    has_nan |= x[k] != x[k];
    const float magnitude = std::fabs(x[k]);
    largest = magnitude > largest ? magnitude : largest;
  }
  out.d = has_nan ? uint16_t{0x7e00} : float_to_half(largest / 127.0f);
  const float d = half_to_float(out.d);
  const float divisor = d == 0.0f ? 1.0f : d;
  for (int k = 0; k < 32; ++k) {
    const F32x1 q = F32x1::min({127.0f}, F32x1::max({-127.0f}, {x[k] / divisor}));
    const float rounded = F32x1::round(q).v;
    out.q[k] = rounded == rounded ? static_cast<int8_t>(static_cast<int>(rounded)) : int8_t{0};
  }
}

void decode_q5_1(const uint8_t* row, int64_t block, BlockW8& out) {
  const uint8_t* p = row + block * 24;
  const float d = load_half(p);
  const float m = load_half(p + 2);
  int8_t q[32];
  float x[32];
  q5_values(p + 4, p + 8, q);
  for (int k = 0; k < 32; ++k) x[k] = d * static_cast<float>(q[k]) + m;
  requantise(x, out);
}

void decode_q5_k(const uint8_t* row, int64_t block, BlockW8& out) {
  const uint8_t* p = row + block / 8 * 176;
  const int i = static_cast<int>(block % 8);
  const KScale scale = k_scale(p, i);
  const uint8_t* q = p + 48 + i / 2 * 32;
  const int shift = i % 2 * 4;
  float x[32];
  for (int k = 0; k < 32; ++k) {
    const int value = ((q[k] >> shift) & 15) | (((p[16 + k] >> i) & 1) << 4);
    x[k] = scale.d * static_cast<float>(value) - scale.m;
  }
  requantise(x, out);
}

void decode_q6_k(const uint8_t* row, int64_t block, BlockW8& out) {
  const uint8_t* p = row + block / 8 * 210;
  const int i = static_cast<int>(block % 8);
  const int quarter = i % 4;
  const uint8_t* low = p + i / 4 * 64 + quarter % 2 * 32;
  const uint8_t* high = p + 128 + i / 4 * 32;
  const auto* scales = reinterpret_cast<const int8_t*>(p + 192) + i * 2;
  const float d = load_half(p + 208);
  float x[32];
  for (int k = 0; k < 32; ++k) {
    const int value = ((low[k] >> (quarter / 2 * 4)) & 15) | (((high[k] >> (quarter * 2)) & 3) << 4);
    x[k] = (d * static_cast<float>(scales[k / 16])) * static_cast<float>(value - 32);
  }
  requantise(x, out);
}

void decode_f16(const uint8_t* row, int64_t block, uint16_t* out) {
  std::memcpy(out, row + block * 64, 64);
}

void bf16_to_f32(const uint8_t* row, int64_t block, float* out) {
  for (int k = 0; k < 32; ++k) {
    out[k] = __builtin_bit_cast(float, static_cast<uint32_t>(load_u16(row + block * 64 + 2 * k)) << 16);
  }
}

void bf16_to_f16(const uint8_t* row, int64_t block, uint16_t* out) {
  float x[32];
  bf16_to_f32(row, block, x);
  for (int k = 0; k < 32; ++k) out[k] = float_to_half(x[k]);
}

void decode_f32(const uint8_t* row, int64_t block, float* out) {
  std::memcpy(out, row + block * 128, 128);
}

constexpr RawType kRawTypes[] = {
    {0, "F32", 1, 4, nullptr, nullptr, nullptr, decode_f32},
    {1, "F16", 1, 2, nullptr, nullptr, decode_f16, nullptr},
    {2, "Q4_0", 32, 18, decode_q4_0, nullptr, nullptr, nullptr},
    {3, "Q4_1", 32, 20, decode_q4_1, nullptr, nullptr, nullptr},
    {6, "Q5_0", 32, 22, nullptr, decode_q5_0, nullptr, nullptr},
    {7, "Q5_1", 32, 24, nullptr, decode_q5_1, nullptr, nullptr},
    {8, "Q8_0", 32, 34, nullptr, decode_q8_0, nullptr, nullptr},
    {12, "Q4_K", 256, 144, decode_q4_k, nullptr, nullptr, nullptr},
    {13, "Q5_K", 256, 176, nullptr, decode_q5_k, nullptr, nullptr},
    {14, "Q6_K", 256, 210, nullptr, decode_q6_k, nullptr, nullptr},
    {kGgmlBf16, "BF16", 1, 2, nullptr, nullptr, bf16_to_f16, bf16_to_f32},
};

}  // namespace

const RawType* find_raw_type(int ggml_type) {
  for (const RawType& type : kRawTypes) {
    if (type.ggml_type == ggml_type) return &type;
  }
  return nullptr;
}

bool bf16_fits_f16(const uint8_t* data, size_t num_values) {
  constexpr uint16_t kAboveF16 = 0x4780;  // 65536, the first bfloat16 beyond 65504
  constexpr uint16_t kInfinity = 0x7f80;
  bool fits = true;
  for (size_t i = 0; i < num_values; ++i) {
    const uint16_t magnitude = load_u16(data + 2 * i) & 0x7fff;
    fits &= magnitude < kAboveF16 || magnitude >= kInfinity;
  }
  return fits;
}

}  // namespace caudal
