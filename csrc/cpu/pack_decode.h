// Decoders of ggml's tensor blocks, 32 values at a time. Formats: the block structs of ggml
// (ggml-common.h); weights/dequant.py describes each and is the reference.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace caudal {

// 32 values of one row on their way into a packed block.
struct BlockW4 {
  uint8_t q[16];  // byte j: value j in the low nibble, j + 16 in the high
  uint16_t d;
  uint16_t m;
};

struct BlockW8 {
  int8_t q[32];
  uint16_t d;
};

using DecodeW4 = void (*)(const uint8_t* row, int64_t block, BlockW4& out);
using DecodeW8 = void (*)(const uint8_t* row, int64_t block, BlockW8& out);
using DecodeF16 = void (*)(const uint8_t* row, int64_t block, uint16_t* out);
using DecodeF32 = void (*)(const uint8_t* row, int64_t block, float* out);

// How one ggml type is read; exactly one decoder is set, which says its packed format.
struct RawType {
  int ggml_type;
  const char* name;
  int block_size;
  int block_bytes;
  DecodeW4 w4;
  DecodeW8 w8;
  DecodeF16 f16;
  DecodeF32 f32;
};

constexpr int kGgmlBf16 = 30;

// Null if the type is not supported. BF16 has both f16 and f32: the values decide.
const RawType* find_raw_type(int ggml_type);

// Whether no finite bfloat16 is beyond float16's range.
bool bf16_fits_f16(const uint8_t* data, size_t num_values);

}  // namespace caudal
