// Converts matrices from the blocks of a model file to the layout of kernels.h.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace caudal {

// A matrix as it lies in a model file. GGML type numbers: see weights/ggml_types.py.
struct RawMatrix {
  int ggml_type;
  int64_t rows;
  int64_t cols;
  const uint8_t* data;
  size_t num_bytes;
};

// One or several matrices stacked by rows; neighbours that share a format share a segment.
struct LinearWeight {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<PackedMatrix> segments;
  std::vector<std::shared_ptr<std::byte>> memory;  // of the segments
  std::vector<float> bias;                         // [rows] or empty
  Activations activations = Activations::kInt8;

  size_t num_bytes() const;
};

// Bytes of 16 rows x 32 columns.
int64_t block_bytes(WeightFormat format);

// Bytes of `rows` padded to whole groups of 16, in `format`, with the exponent that follows them.
int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t cols);

// Reads PackedMatrix::exponent of packed blocks; throws std::invalid_argument if it is impossible.
int32_t packed_exponent(WeightFormat format, int64_t rows, int64_t cols, const std::byte* data);

// Throws std::invalid_argument if a type is unknown or the sizes contradict each other.
LinearWeight pack_linear(const std::vector<RawMatrix>& parts, Arena& arena, int num_threads);

// The values that the packed matrix stands for -> out [rows, cols].
void unpack_linear(const LinearWeight& weight, float* out);

}  // namespace caudal
