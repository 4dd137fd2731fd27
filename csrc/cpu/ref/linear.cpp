// Matrix products in plain C++: the arithmetic of numerics.h, one output at a time.
#include "../isa_kernels.h"
#include "../numerics.h"

namespace caudal::ref {
namespace {

// The activations of one token and 32 columns in each form that a weight format multiplies.
struct Panel {
  float x[32];
  int16_t q13[32];
  int16_t q4[32];  // for w4: 8 or 12 bits
  float d4;
  float s4;
  float d13;
};
static_assert(sizeof(Panel) <= kPanelBytesPerBlock);

constexpr int64_t kW4Bytes = 320;
constexpr int64_t kW8Bytes = 544;

float load_half(const std::byte* p, int64_t index) {
  return half_to_float(reinterpret_cast<const uint16_t*>(p)[index]);
}

uint32_t max_magnitude(const float* x) {
  uint32_t max_bits = 0;
  for (int k = 0; k < 32; ++k) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x[k]) & 0x7fffffffu;
    if (bits > max_bits) max_bits = bits;
  }
  return max_bits;
}

// To nearest even, from the exact value: the float between is rounded to odd.
uint16_t double_to_half(double x) {
  const auto nearest = static_cast<float>(x);
  uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
  const double back = nearest;
  if (back != x && back == back) {
    if (__builtin_fabs(back) > __builtin_fabs(x)) --bits;  // towards zero
    bits |= 1;
  }
  return float_to_half(__builtin_bit_cast(float, bits));
}

double power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(1023 + exponent) << 52);
}

// The bf16 weight of a value that is scaled already, see numerics.h.
float bf16_weight(double value) {
  const auto half = static_cast<int16_t>(double_to_half(value));
  const int bits = (((half + 4) >> 3) & kBf16Mask) | kBf16Exponent;
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

int32_t quantise(float x, float inverse) {
  const float q = F32x1::round({x * inverse}).v;
  return q == q ? static_cast<int32_t>(q) : 0;
}

void make_panel(Panel& panel, Activations activations) {
  const uint32_t max_bits = max_magnitude(panel.x);
  const QuantScale scale4 = 
      quant_scale(max_bits, activations == Activations::kInt12 ? kQuantMax12 : kQuantMax8);
  const QuantScale scale13 = quant_scale(max_bits, kQuantMax13);
  int32_t sum = 0;
  for (int k = 0; k < 32; ++k) {
    panel.q4[k] = static_cast<int16_t>(quantise(panel.x[k], scale4.inverse));
    panel.q13[k] = static_cast<int16_t>(quantise(panel.x[k], scale13.inverse));
    sum += panel.q4[k];
  }
  panel.d4 = scale4.d;
  panel.s4 = scale4.d * static_cast<float>(sum);
  panel.d13 = scale13.d;
}

void make_panels(const LinearArgs& args, int64_t token, int64_t cols, Panel* panels) {
  const float* x = args.x + token * args.x_stride;
  const float inverse =
      args.prologue == Prologue::kRmsNorm ? inverse_rms(x, cols, args.eps) : 0.0f;
  for (int64_t block = 0; block < cols / 32; ++block) {
    for (int64_t i = 0; i < 32; ++i) {
      const int64_t k = block * 32 + i;
      float value = x[k];
      if (args.prologue == Prologue::kRmsNorm) value = (value * inverse) * args.norm_weight[k];
      if (args.prologue == Prologue::kSiluMul) {
        value = silu_mul_approx(F32x1{value}, F32x1{x[cols + k]}).v;
      }
      panels[block].x[i] = value;
    }
    make_panel(panels[block], args.activations);
  }
}

float dot_w4(const std::byte* group, int row, const Panel* panels, int64_t num_blocks) {
  float acc = 0.0f;
  for (int64_t b = 0; b < num_blocks; ++b, group += kW4Bytes) {
    const auto* quants = reinterpret_cast<const uint8_t*>(group);
    int32_t sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int byte = quants[64 * (k / 4) + 4 * row + k % 4];
      sum += (byte & 15) * panels[b].q4[k] + (byte >> 4) * panels[b].q4[16 + k];
    }
    const float scale = load_half(group + 256, row) * panels[b].d4;
    acc = __builtin_fmaf(static_cast<float>(sum), scale, acc);
    acc = __builtin_fmaf(load_half(group + 288, row), panels[b].s4, acc);
  }
  return acc;
}

float dot_w8(const std::byte* group, int row, const Panel* panels, int64_t num_blocks) {
  float acc = 0.0f;
  for (int64_t b = 0; b < num_blocks; ++b, group += kW8Bytes) {
    const auto* quants = reinterpret_cast<const int8_t*>(group);
    int32_t sum = 0;
    for (int k = 0; k < 32; ++k) {
      sum += quants[32 * (k / 2) + 2 * row + k % 2] * panels[b].q13[k];
    }
    const float scale = load_half(group + 512, row) * panels[b].d13;
    acc = __builtin_fmaf(static_cast<float>(sum), scale, acc);
  }
  return acc;
}

// Columns of a pair, see numerics.h.
int first_column(WeightFormat format, int pair) {
  if (format == WeightFormat::kW8) return 2 * pair;
  return 4 * (pair / 4) + pair % 4 / 2 + 16 * (pair % 2);
}

// The scaled value of row `row` and column `k` of a block.
double scaled_value(WeightFormat format, const std::byte* block, int row, int k, double factor) {
  const auto scaled = [&](int64_t offset) {
    const float half = load_half(block + offset, row);
    return static_cast<double>(half_to_float(double_to_half(half * factor)));
  };
  if (format == WeightFormat::kW8) {
    const auto q = static_cast<int8_t>(block[32 * (k / 2) + 2 * row + k % 2]);
    return q * scaled(512);
  }
  const auto byte = static_cast<uint8_t>(block[64 * (k % 16 / 4) + 4 * row + k % 4]);
  return (k < 16 ? byte & 15 : byte >> 4) * scaled(256) + scaled(288);
}

float dot_bf16(const PackedMatrix& matrix, const std::byte* group, int row, const Panel* panels) {
  const bool is_w4 = matrix.format == WeightFormat::kW4;
  const double factor = power_of_two(matrix.exponent == kNotFinite ? 0 : matrix.exponent);
  float acc = 0.0f;
  for (int64_t b = 0; b < matrix.cols / 32; ++b, group += is_w4 ? kW4Bytes : kW8Bytes) {
    float sums[2] = {};
    for (int pair = 0; pair < 16; ++pair) {
      for (int i = 0; i < 2; ++i) {
        const int k = first_column(matrix.format, pair) + i * (is_w4 ? 2 : 1);
        const float weight = bf16_weight(scaled_value(matrix.format, group, row, k, factor));
        sums[i] = __builtin_fmaf(bf16_to_float(float_to_bf16(panels[b].x[k])), weight, sums[i]);
      }
    }
    acc += sums[0] + sums[1];
  }
  return acc * bf16_factor(matrix.exponent);
}

float dot_float(const std::byte* group, int row, const Panel* panels, int64_t num_blocks,
                bool is_half) {
  float acc = 0.0f;
  for (int64_t k = 0; k < num_blocks * 32; ++k) {
    const int64_t index = k * 16 + row;
    const float w =
        is_half ? load_half(group, index) : reinterpret_cast<const float*>(group)[index];
    acc = __builtin_fmaf(w, panels[k / 32].x[k % 32], acc);
  }
  return acc;
}

int64_t group_bytes(const PackedMatrix& matrix) {
  const int64_t num_blocks = matrix.cols / 32;
  switch (matrix.format) {
    case WeightFormat::kW4:
      return num_blocks * kW4Bytes;
    case WeightFormat::kW8:
      return num_blocks * kW8Bytes;
    case WeightFormat::kF16:
      return matrix.cols * 16 * 2;
    case WeightFormat::kF32:
      return matrix.cols * 16 * 4;
  }
  return 0;
}

float dot(const PackedMatrix& matrix, int64_t row, const Panel* panels, Activations activations) {
  const std::byte* group = matrix.data + row / 16 * group_bytes(matrix);
  const int lane = static_cast<int>(row % 16);
  const int64_t num_blocks = matrix.cols / 32;
  const bool is_quantised =
      matrix.format == WeightFormat::kW4 || matrix.format == WeightFormat::kW8;
  if (is_quantised && activations == Activations::kBf16) {
    return dot_bf16(matrix, group, lane, panels);
  }
  switch (matrix.format) {
    case WeightFormat::kW4:
      return dot_w4(group, lane, panels, num_blocks);
    case WeightFormat::kW8:
      return dot_w8(group, lane, panels, num_blocks);
    case WeightFormat::kF16:
    case WeightFormat::kF32:
      return dot_float(group, lane, panels, num_blocks, matrix.format == WeightFormat::kF16);
  }
  return 0.0f;
}

void finish_row_group(const LinearArgs& args, const PackedMatrix& matrix, int64_t group,
                      int64_t first_column, const Panel* panels) {
  const int64_t num_blocks = matrix.cols / 32;
  const int64_t row_end = group * 16 + 16 < matrix.rows ? group * 16 + 16 : matrix.rows;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    for (int64_t row = group * 16; row < row_end; ++row) {
      const int64_t column = first_column + row;
      float value = dot(matrix, row, panels + token * num_blocks, args.activations);
      if (args.bias != nullptr) value += args.bias[column];
      if (args.residual != nullptr) value += args.residual[token * args.out_stride + column];
      args.out[token * args.out_stride + column] = value;
    }
  }
}

}  // namespace

void linear(const LinearArgs& args, Worker& worker) {
  const int64_t cols = args.segments[0].cols;
  auto* panels = reinterpret_cast<Panel*>(args.panels);
  for (int64_t t = next_task(worker); t < args.num_tokens; t = next_task(worker)) {
    make_panels(args, t, cols, panels + t * (cols / 32));
  }
  barrier(worker);
  // Tasks number the row groups of all segments in order.
  int64_t first_task = 0;
  int64_t first_column = 0;
  int64_t task = next_task(worker);
  for (int s = 0; s < args.num_segments; ++s) {
    const PackedMatrix& matrix = args.segments[s];
    const int64_t num_groups = (matrix.rows + 15) / 16;
    for (; task < first_task + num_groups; task = next_task(worker)) {
      finish_row_group(args, matrix, task - first_task, first_column, panels);
    }
    first_task += num_groups;
    first_column += matrix.rows;
  }
}

}  // namespace caudal::ref
