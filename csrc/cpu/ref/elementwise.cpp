// Embedding, RMS norm and gated activation in plain C++; a task is one token.
#include "../isa_kernels.h"
#include "../numerics.h"

namespace caudal::ref {
namespace {

float half_at(const std::byte* p, int64_t index) {
  return half_to_float(reinterpret_cast<const uint16_t*>(p)[index]);
}

float weight_at(const PackedMatrix& table, int64_t row, int64_t k) {
  const int64_t lane = row % 16;
  const int64_t group = row / 16;
  const int64_t block = group * (table.cols / 32) + k / 32;
  const int64_t i = k % 32;
  switch (table.format) {
    case WeightFormat::kW4: {
      const std::byte* p = table.data + block * 320;
      const int byte = std::to_integer<int>(p[64 * (i % 16 / 4) + 4 * lane + i % 4]);
      const int q = i < 16 ? byte & 15 : byte >> 4;
      return __builtin_fmaf(static_cast<float>(q), half_at(p + 256, lane), half_at(p + 288, lane));
    }
    case WeightFormat::kW8: {
      const std::byte* p = table.data + block * 544;
      const auto q = static_cast<int8_t>(p[32 * (i / 2) + 2 * lane + i % 2]);
      return static_cast<float>(q) * half_at(p + 512, lane);
    }
    case WeightFormat::kF16:
      return half_at(table.data, (group * table.cols + k) * 16 + lane);
    case WeightFormat::kF32:
      return reinterpret_cast<const float*>(table.data)[(group * table.cols + k) * 16 + lane];
  }
  return 0.0f;
}

}  // namespace

void embed(const EmbedArgs& args, Worker& worker) {
  for (int64_t t = next_task(worker); t < args.batch->num_tokens; t = next_task(worker)) {
    const int64_t row = args.batch->input_ids[t];
    float* out = args.out + t * args.out_stride;
    for (int64_t k = 0; k < args.table.cols; ++k) out[k] = weight_at(args.table, row, k);
  }
}

void rms_norm(const RmsNormArgs& args, Worker& worker) {
  for (int64_t t = next_task(worker); t < args.num_tokens; t = next_task(worker)) {
    const float* x = args.x + t * args.x_stride;
    float* out = args.out + t * args.out_stride;
    const float inverse = inverse_rms(x, args.cols, args.eps);
    for (int64_t k = 0; k < args.cols; ++k) out[k] = (x[k] * inverse) * args.weight[k];
  }
}

void silu_mul(const SiluMulArgs& args, Worker& worker) {
  const int64_t cols = args.cols;
  for (int64_t t = next_task(worker); t < args.num_tokens; t = next_task(worker)) {
    const float* gate = args.gate_up + t * 2 * cols;
    for (int64_t k = 0; k < cols; ++k) {
      args.out[t * cols + k] = silu_mul_approx(F32x1{gate[k]}, F32x1{gate[cols + k]}).v;
    }
  }
}

}  // namespace caudal::ref
