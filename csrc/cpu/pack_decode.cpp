#include "pack_decode.h"

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
  const int exponent = (out.d >> 10) & 31;
  const bool is_plain = exponent > 0 && exponent < 28;  // 8 d only adds to the exponent
  out.m = is_plain ? static_cast<uint16_t>((out.d + (3 << 10)) ^ 0x8000)
                   : float_to_half(-8.0f * half_to_float(out.d));
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
  for (int j = 0; j < 16; ++j) {
    const int low = i % 2 == 0 ? (q[j] & 15) | (q[j + 16] << 4) : (q[j] >> 4) | (q[j + 16] & 0xf0);
    out.q[j] = static_cast<uint8_t>(low);
  }
}

// Bit i of `bits` as byte i: 16 if it is set.
uint64_t spread_bits(uint8_t bits) {
  const uint64_t picked = (bits * 0x0101010101010101u) & 0x8040201008040201u;
  return (((picked + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u) << 4;
}

// Values 0 … 31 of Q5_0 and Q5_1: nibbles and a word of fifth bits.
void q5_values(const uint8_t* high_bits, const uint8_t* nibbles, int8_t* out) {
  uint8_t high[32];
  for (int i = 0; i < 4; ++i) {
    const uint64_t bytes = spread_bits(high_bits[i]);
    std::memcpy(high + 8 * i, &bytes, 8);
  }
  for (int j = 0; j < 16; ++j) {
    out[j] = static_cast<int8_t>((nibbles[j] & 15) | high[j]);
    out[j + 16] = static_cast<int8_t>((nibbles[j] >> 4) | high[j + 16]);
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
// not bias the values. Values that are not numbers, or infinite beside the scale, become 0.
void requantise(const float* x, BlockW8& out) {
  int32_t max_bits = 0;
  for (int k = 0; k < 32; ++k) {
    const int32_t bits = __builtin_bit_cast(int32_t, x[k]) & 0x7fffffff;
    max_bits = bits > max_bits ? bits : max_bits;
  }
  out.d = float_to_half(__builtin_bit_cast(float, max_bits) / 127.0f);
  const float d = half_to_float(out.d);
  if (!(d < __builtin_inff())) {
    std::memset(out.q, 0, sizeof(out.q));
    return;
  }
  const float divisor = d == 0.0f ? 1.0f : d;
  int32_t q[32];
  for (int k = 0; k < 32; ++k) {
    const F32x1 limited = F32x1::min({127.0f}, F32x1::max({-127.0f}, {x[k] / divisor}));
    // The sum's low bits hold the integer.
    q[k] = __builtin_bit_cast(int32_t, limited.v + kRoundShift);
  }
  for (int k = 0; k < 32; ++k) out.q[k] = static_cast<int8_t>(q[k]);
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
  const auto mask = static_cast<uint8_t>(1 << i);
  uint8_t values[32];
  float x[32];
  for (int k = 0; k < 32; ++k) {
    const int low = i % 2 == 0 ? q[k] & 15 : q[k] >> 4;
    values[k] = static_cast<uint8_t>(low | ((p[16 + k] & mask) != 0 ? 16 : 0));
  }
  for (int k = 0; k < 32; ++k) x[k] = scale.d * static_cast<float>(values[k]) - scale.m;
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
  const int high_shift = quarter * 2;
  int8_t values[32];
  float x[32];
  for (int k = 0; k < 32; ++k) {
    const int nibble = quarter < 2 ? low[k] & 15 : low[k] >> 4;
    values[k] = static_cast<int8_t>((nibble | (((high[k] >> high_shift) & 3) << 4)) - 32);
  }
  for (int half = 0; half < 2; ++half) {
    const float scale = d * static_cast<float>(scales[half]);
    for (int k = 16 * half; k < 16 * half + 16; ++k) x[k] = scale * static_cast<float>(values[k]);
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
  uint16_t bits[32];
  std::memcpy(bits, row + block * 64, 64);
  bool is_plain = true;  // all are normal numbers in both formats
  for (uint16_t b : bits) {
    const auto above = static_cast<uint16_t>((b & 0x7fff) - (113 << 7));
    is_plain &= above < (30 << 7);
  }
  if (is_plain) {
    for (int k = 0; k < 32; ++k) {
      const int magnitude = ((bits[k] & 0x7fff) - (112 << 7)) << 3;
      out[k] = static_cast<uint16_t>(magnitude | (bits[k] & 0x8000));
    }
    return;
  }
  for (int k = 0; k < 32; ++k) {
    out[k] = float_to_half(__builtin_bit_cast(float, static_cast<uint32_t>(bits[k]) << 16));
  }
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
  uint16_t is_beyond = 0;
  for (size_t i = 0; i < num_values; ++i) {
    const uint16_t magnitude = load_u16(data + 2 * i) & 0x7fff;
    is_beyond |= magnitude >= kAboveF16 && magnitude < kInfinity;
  }
  return is_beyond == 0;
}

}  // namespace caudal
