#include "../isa_kernels.h"
#include "../rope_impl.h"

namespace caudal::ref {
namespace {

struct ScalarConvert {
  static void to_half(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; ++i) out[i] = float_to_half(x[i]);
  }

  static float to_int8(const float* x, int n, int8_t* out) {
    const QuantScale scale = scale_of(x, n, kQuantMax8);
    for (int i = 0; i < n; ++i) out[i] = static_cast<int8_t>(quantize(x[i], scale));
    return scale.d;
  }

  static float to_int16(const float* x, int n, int16_t* out) {
    const QuantScale scale = scale_of(x, n, kQuantMax16);
    for (int i = 0; i < n; ++i) out[i] = static_cast<int16_t>(quantize(x[i], scale));
    return scale.d;
  }

 private:
  static QuantScale scale_of(const float* x, int n, float quant_max) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) {
      const uint32_t magnitude = __builtin_bit_cast(uint32_t, x[i]) & 0x7fffffffu;
      bits = magnitude > bits ? magnitude : bits;
    }
    return quant_scale(bits, quant_max);
  }

  // NaN and infinity make the scale NaN, whatever is stored.
  static float quantize(float x, QuantScale scale) {
    const float q = scale.d == scale.d ? x * scale.inverse : 0.0f;
    return (q + kRoundShift) - kRoundShift;
  }
};

}  // namespace

void rope_table(const RopeTableArgs& args, Worker& worker) { run_rope_table(args, worker); }

void rope_and_cache(const RopeCacheArgs& args, Worker& worker) {
  run_rope_and_cache<ScalarConvert>(args, worker);
}

}  // namespace caudal::ref
