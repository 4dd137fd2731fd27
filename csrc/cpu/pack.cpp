#include "pack.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "numerics.h"
#include "pack_decode.h"
#include "thread_pool.h"

namespace caudal {
namespace {

constexpr int64_t kGroup = 16;  // rows

// One matrix's place in its segment.
struct Part {
  const RawType* type;
  const uint8_t* data;
  int64_t row_bytes;
  int64_t rows;
};

// What the threads need to fill one segment.
struct PackJob {
  WeightFormat format;
  std::vector<Part> parts;
  int64_t rows = 0;
  int64_t num_blocks = 0;  // of 32 columns
  std::byte* out = nullptr;
  std::atomic<uint32_t>* largest = nullptr;  // bits of the largest |value|; infinity and NaN above
};

// A row of a segment, found in its part; null data for a padding row.
struct RowSource {
  const RawType* type = nullptr;
  const uint8_t* data = nullptr;
};

RowSource find_row(const PackJob& job, int64_t row) {
  for (const Part& part : job.parts) {
    if (row < part.rows) return {part.type, part.data + row * part.row_bytes};
    row -= part.rows;
  }
  return {};
}

void write_w4(const RowSource& row, int64_t block, int64_t r, std::byte* out) {
  BlockW4 values;
  row.type->w4(row.data, block, values);
  for (int64_t i = 0; i < 4; ++i) std::memcpy(out + 64 * i + 4 * r, values.q + 4 * i, 4);
  std::memcpy(out + 256 + 2 * r, &values.d, 2);
  std::memcpy(out + 288 + 2 * r, &values.m, 2);
}

void write_w8(const RowSource& row, int64_t block, int64_t r, std::byte* out) {
  BlockW8 values;
  row.type->w8(row.data, block, values);
  for (int64_t p = 0; p < 16; ++p) std::memcpy(out + 32 * p + 2 * r, values.q + 2 * p, 2);
  std::memcpy(out + 512 + 2 * r, &values.d, 2);
}

void write_f16(const RowSource& row, int64_t block, int64_t r, std::byte* out) {
  uint16_t values[32];
  row.type->f16(row.data, block, values);
  for (int64_t k = 0; k < 32; ++k) std::memcpy(out + 2 * (16 * k + r), values + k, 2);
}

void write_f32(const RowSource& row, int64_t block, int64_t r, std::byte* out) {
  float values[32];
  row.type->f32(row.data, block, values);
  for (int64_t k = 0; k < 32; ++k) std::memcpy(out + 4 * (16 * k + r), values + k, 4);
}

using WriteBlock = void (*)(const RowSource&, int64_t block, int64_t r, std::byte* out);
constexpr WriteBlock kWriteBlock[] = {write_w4, write_w8, write_f16, write_f32};

bool has_exponent(WeightFormat format) {
  return format == WeightFormat::kW4 || format == WeightFormat::kW8;
}

int64_t blocks_bytes(WeightFormat format, int64_t rows, int64_t cols) {
  return (rows + kGroup - 1) / kGroup * (cols / 32) * block_bytes(format);
}

float half_in(const std::byte* p, int64_t index) {
  uint16_t value;
  std::memcpy(&value, p + 2 * index, 2);
  return half_to_float(value);
}

uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// Bits of the largest |value| that any quantised values could give a block.
uint32_t largest_bits(WeightFormat format, const std::byte* block) {
  uint32_t largest = 0;
  for (int64_t r = 0; r < kGroup; ++r) {
    if (format == WeightFormat::kW4) {
      const float m = half_in(block + 256, kGroup + r);
      const float top = 15.0f * half_in(block + 256, r) + m;
      largest = std::max({largest, magnitude_bits(m), magnitude_bits(top)});
    } else {
      largest = std::max(largest, magnitude_bits(128.0f * half_in(block + 512, r)));
    }
  }
  return largest;
}

// See PackedMatrix.
int32_t exponent_of(uint32_t bits) {
  constexpr float kLimit = 1.98f;
  if (bits >= 0x7f800000u) return kNotFinite;
  if (bits == 0) return 0;
  int exponent = 0;
  const float fraction = 2.0f * std::frexp(std::bit_cast<float>(bits), &exponent);  // in [1, 2)
  return fraction < kLimit ? 1 - exponent : -exponent;
}

void raise_to(std::atomic<uint32_t>& largest, uint32_t bits) {
  uint32_t known = largest.load();
  while (bits > known && !largest.compare_exchange_weak(known, bits)) {
  }
}

// Padding rows keep the zeros that fresh pages have.
void pack_group(const PackJob& job, int64_t group) {
  const WriteBlock write = kWriteBlock[static_cast<int>(job.format)];
  const int64_t bytes = block_bytes(job.format);
  RowSource rows[kGroup];
  for (int64_t r = 0; r < kGroup; ++r) rows[r] = find_row(job, group * kGroup + r);
  std::byte* out = job.out + group * job.num_blocks * bytes;
  uint32_t largest = 0;
  for (int64_t block = 0; block < job.num_blocks; ++block, out += bytes) {
    for (int64_t r = 0; r < kGroup; ++r) {
      if (rows[r].data != nullptr) write(rows[r], block, r, out);
    }
    if (has_exponent(job.format)) largest = std::max(largest, largest_bits(job.format, out));
  }
  raise_to(*job.largest, largest);
}

void pack_groups(void* context, Worker& worker) {
  const auto& job = *static_cast<const PackJob*>(context);
  const int64_t num_groups = (job.rows + kGroup - 1) / kGroup;
  for (int64_t g = next_task(worker); g < num_groups; g = next_task(worker)) pack_group(job, g);
}

const RawType& check(const RawMatrix& raw, int64_t cols) {
  const RawType* type = find_raw_type(raw.ggml_type);
  if (type == nullptr) {
    throw std::invalid_argument("ggml type " + std::to_string(raw.ggml_type) + " cannot be packed");
  }
  const std::string name = std::string(type->name) + " matrix ";
  if (raw.cols != cols) throw std::invalid_argument(name + "differs in columns from the first");
  if (raw.rows < 1 || raw.rows > (int64_t{1} << 31)) {
    throw std::invalid_argument(name + "has " + std::to_string(raw.rows) + " rows");
  }
  const int64_t multiple = type->block_size > 32 ? type->block_size : 32;
  if (cols < 1 || cols > (int64_t{1} << 24) || cols % multiple != 0) {
    throw std::invalid_argument(name + "has " + std::to_string(cols) +
                                " columns, not a multiple of " + std::to_string(multiple));
  }
  const auto expected =
      static_cast<size_t>(raw.rows * (cols / type->block_size) * type->block_bytes);
  if (raw.num_bytes != expected) {
    throw std::invalid_argument(name + "has " + std::to_string(raw.num_bytes) + " bytes instead of " +
                                std::to_string(expected));
  }
  return *type;
}

WeightFormat packed_format(const RawType& type, const RawMatrix& raw) {
  if (type.ggml_type == kGgmlBf16) {
    return bf16_fits_f16(raw.data, raw.num_bytes / 2) ? WeightFormat::kF16 : WeightFormat::kF32;
  }
  if (type.w4 != nullptr) return WeightFormat::kW4;
  if (type.w8 != nullptr) return WeightFormat::kW8;
  return type.f16 != nullptr ? WeightFormat::kF16 : WeightFormat::kF32;
}

std::vector<PackJob> plan_segments(const std::vector<RawMatrix>& parts) {
  std::vector<PackJob> jobs;
  for (const RawMatrix& raw : parts) {
    const RawType& type = check(raw, parts.front().cols);
    const WeightFormat format = packed_format(type, raw);
    if (jobs.empty() || jobs.back().format != format) {
      jobs.push_back({.format = format, .parts = {}, .num_blocks = raw.cols / 32});
    }
    const int64_t row_bytes = raw.cols / type.block_size * type.block_bytes;
    jobs.back().parts.push_back({&type, raw.data, row_bytes, raw.rows});
    jobs.back().rows += raw.rows;
  }
  return jobs;
}

float packed_value(const PackedMatrix& matrix, int64_t row, int64_t k) {
  const int64_t r = row % kGroup;
  const int64_t i = k % 32;
  const std::byte* p = matrix.data + (row / kGroup * (matrix.cols / 32) + k / 32) *
                                         block_bytes(matrix.format);
  switch (matrix.format) {
    case WeightFormat::kW4: {
      const int byte = std::to_integer<int>(p[64 * (i % 16 / 4) + 4 * r + i % 4]);
      const int q = i < 16 ? byte & 15 : byte >> 4;
      return half_in(p + 256, r) * static_cast<float>(q) + half_in(p + 288, r);
    }
    case WeightFormat::kW8: {
      const auto q = static_cast<int8_t>(p[32 * (i / 2) + 2 * r + i % 2]);
      return half_in(p + 512, r) * static_cast<float>(q);
    }
    case WeightFormat::kF16:
      return half_in(p, 16 * i + r);
    case WeightFormat::kF32: {
      float value;
      std::memcpy(&value, p + 4 * (16 * i + r), 4);
      return value;
    }
  }
  return 0.0f;
}

}  // namespace

int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kW4:
      return 320;
    case WeightFormat::kW8:
      return 544;
    case WeightFormat::kF16:
      return 1024;
    case WeightFormat::kF32:
      return 2048;
  }
  throw std::invalid_argument("unknown weight format");
}

int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t cols) {
  return blocks_bytes(format, rows, cols) + (has_exponent(format) ? kExponentBytes : 0);
}

int32_t packed_exponent(WeightFormat format, int64_t rows, int64_t cols, const std::byte* data) {
  if (!has_exponent(format)) return 0;
  int32_t exponent;
  std::memcpy(&exponent, data + blocks_bytes(format, rows, cols), sizeof exponent);
  if (exponent != kNotFinite && std::abs(exponent) > 64) {
    throw std::invalid_argument("blocks: their exponent is " + std::to_string(exponent));
  }
  return exponent;
}

size_t LinearWeight::num_bytes() const {
  size_t total = 0;
  for (const PackedMatrix& segment : segments) {
    total += static_cast<size_t>(packed_bytes(segment.format, segment.rows, segment.cols));
  }
  return total;
}

LinearWeight pack_linear(const std::vector<RawMatrix>& parts, Arena& arena, int num_threads) {
  if (parts.empty()) throw std::invalid_argument("a linear weight needs at least one matrix");
  std::vector<PackJob> jobs = plan_segments(parts);
  LinearWeight weight;
  weight.cols = parts.front().cols;
  for (PackJob& job : jobs) {
    const auto bytes = static_cast<size_t>(packed_bytes(job.format, job.rows, weight.cols));
    weight.memory.push_back(arena.allocate(bytes));
    job.out = weight.memory.back().get();
    std::atomic<uint32_t> largest = 0;
    job.largest = &largest;
    run_parallel(num_threads, pack_groups, &job);
    const int32_t exponent = exponent_of(largest);
    if (has_exponent(job.format)) {
      std::memcpy(job.out + bytes - kExponentBytes, &exponent, sizeof exponent);
    }
    weight.segments.push_back({job.format, job.rows, weight.cols, job.out, exponent});
    weight.rows += job.rows;
  }
  return weight;
}

void unpack_linear(const LinearWeight& weight, float* out) {
  for (const PackedMatrix& segment : weight.segments) {
    for (int64_t row = 0; row < segment.rows; ++row) {
      for (int64_t k = 0; k < segment.cols; ++k) *out++ = packed_value(segment, row, k);
    }
  }
}

}  // namespace caudal
