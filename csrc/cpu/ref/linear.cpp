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

int32_t quantise(float x, float inverse) {
  const float q = F32x1::round({x * inverse}).v;
  return q == q ? static_cast<int32_t>(q) : 0;
}

void make_panel(Panel& panel, bool is_wide) {
  const uint32_t max_bits = max_magnitude(panel.x);
  const QuantScale scale4 = quant_scale(max_bits, is_wide ? kQuantMax12 : kQuantMax8);
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
    make_panel(panels[block], args.is_wide);
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

float dot(const PackedMatrix& matrix, int64_t row, const Panel* panels) {
  const std::byte* group = matrix.data + row / 16 * group_bytes(matrix);
  const int lane = static_cast<int>(row % 16);
  const int64_t num_blocks = matrix.cols / 32;
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
      float value = dot(matrix, row, panels + token * num_blocks);
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
