// Attention one row at a time in plain C++, with the arithmetic written in attention_kernels.h.
#include "../attention_schedule.h"
#include "../attention_tiles.h"
#include "../isa_kernels.h"
#include "../numerics.h"

namespace caudal::ref {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504f;
constexpr float kQuantMax15 = 32767.0f;
constexpr float kInfinity = __builtin_inff();

float exp2_of(float x) { return exp2_approx(F32x1{x}).v; }

// What exp2_coarse asks of a vector type.
struct ScalarExp : F32x1 {
  static ScalarExp set1(float x) { return {{x}}; }
  static ScalarExp fma(ScalarExp a, ScalarExp b, ScalarExp c) { return {F32x1::fma(a, b, c)}; }
  static ScalarExp fraction(ScalarExp x) {
    return {{x.v == -kInfinity ? 0.0f : x.v - __builtin_floorf(x.v)}};
  }
  static ScalarExp scale(ScalarExp p, ScalarExp x) {
    if (x.v != x.v) return x;
    if (x.v < -200.0f) return {{0.0f}};
    const auto exponent = static_cast<uint64_t>(1023 + static_cast<int>(__builtin_floorf(x.v)));
    return {{static_cast<float>(p.v * __builtin_bit_cast(double, exponent << 52))}};
  }
};

// Lane i += lane i + count / 2, count / 4 … 1; the sum of all.
float sum_lanes(float* lane, int count) {
  for (int step = count / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  }
  return lane[0];
}

uint32_t magnitude_bits(float x) { return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu; }

// Rounds to nearest even and saturates to int16; NaN gives -32768, as the vector instructions do.
int16_t round_int16(float x) {
  if (!(x >= -32768.0f)) return -32768;
  if (x > 32767.0f) return 32767;
  return static_cast<int16_t>((x + kRoundShift) - kRoundShift);
}

// The keys and values of one (sequence, head).
struct Cache {
  const KVLayer& kv;
  const int32_t* block_table;
  int head;

  const std::byte* block(int token) const {
    return kv.base + block_table[token / kBlockSize] * kv.block_stride + head * kv.head_stride;
  }
  float bf16(int token, int64_t index) const {
    return bf16_to_float(reinterpret_cast<const uint16_t*>(block(token))[index]);
  }
  float bf16_key(int token, int d) const {
    return bf16(token, d / 2 * 2 * kBlockSize + token % kBlockSize * 2 + d % 2);
  }
  float bf16_value(int token, int d) const {
    const int64_t pair = (kBlockSize + token % kBlockSize / 2 * 2) * int64_t{kv.head_dim};
    return bf16(token, pair + 2 * d + token % 2);
  }
  float half(int token, int64_t index) const {
    return half_to_float(reinterpret_cast<const uint16_t*>(block(token))[index]);
  }
  float half_key(int token, int d) const {
    return half(token, d * kBlockSize + token % kBlockSize);
  }
  float half_value(int token, int d) const {
    return half(token, (kBlockSize + token % kBlockSize) * int64_t{kv.head_dim} + d);
  }
  int int8_key(int token, int d) const {
    const int64_t index = d / 2 * 2 * kBlockSize + token % kBlockSize * 2 + d % 2;
    return static_cast<int8_t>(block(token)[index]);
  }
  int int8_value(int token, int d) const {
    const int64_t pair = (kBlockSize + token % kBlockSize / 2 * 2) * int64_t{kv.head_dim};
    return static_cast<int8_t>(block(token)[pair + 2 * d + token % 2]);
  }
  int tile_key(int token, int d) const {
    const int64_t index = d / 4 * 4 * kBlockSize + token % kBlockSize * 4 + d % 4;
    return static_cast<int8_t>(block(token)[index]);
  }
  int tile_value(int token, int d) const {
    const int64_t quad = (kBlockSize + token % kBlockSize / 4 * 4) * int64_t{kv.head_dim};
    return static_cast<int8_t>(block(token)[quad + 4 * d + token % 4]);
  }
  const float* scales(int token) const {
    const int64_t values = int64_t{2} * kBlockSize * kv.head_dim * kv_value_bytes(kv.format);
    return reinterpret_cast<const float*>(block(token) + values);
  }
  float key_scale(int token) const { return scales(token)[token % kBlockSize]; }
  float value_scale(int token) const { return scales(token)[kBlockSize + token % kBlockSize]; }
};

struct Query {
  float value[kMaxHeadDim];    // f16 cache: q * scale
  int16_t quant[kMaxHeadDim];  // integer caches
  float scale;                 // of `quant`, softmax scale included
};

// Running state of a split, or of the splits merged so far.
struct State {
  float acc[kMaxHeadDim];
  float max;
  float sum;
};

void load_query(const float* q, const KVLayer& kv, float scale, Query& out) {
  uint32_t bits = 0;
  for (int d = 0; d < kv.head_dim; ++d) {
    out.value[d] = q[d] * scale;
    if (magnitude_bits(q[d]) > bits) bits = magnitude_bits(q[d]);
  }
  out.scale = 1.0f;
  if (kv.format == KVFormat::kF16) return;
  if (kv.format == KVFormat::kBf16Tiles) {
    for (int d = 0; d < kv.head_dim; ++d) out.value[d] = bf16_to_float(float_to_bf16(out.value[d]));
    return;
  }
  const QuantScale s = quant_scale(bits, kv.format == KVFormat::kInt8Tiles ? kQuantMax16 : kQuantMax15);
  for (int d = 0; d < kv.head_dim; ++d) out.quant[d] = round_int16(q[d] * s.inverse);
  out.scale = s.d * scale;
}

float score(const Cache& cache, const Query& q, int token) {
  if (cache.kv.format == KVFormat::kF16) {
    float sum = 0.0f;
    for (int d = 0; d < cache.kv.head_dim; ++d) {
      sum = __builtin_fmaf(q.value[d], cache.half_key(token, d), sum);
    }
    return sum;
  }
  int32_t dot = 0;
  for (int d = 0; d < cache.kv.head_dim; ++d) dot += q.quant[d] * cache.int8_key(token, d);
  return (static_cast<float>(dot) * q.scale) * cache.key_scale(token);
}

// acc += sum of weight * value over `count` tokens from `begin` on.
void add_values(const Cache& cache, const float* p, int begin, int count, float correction,
                float* acc) {
  const int head_dim = cache.kv.head_dim;
  if (cache.kv.format == KVFormat::kF16) {
    for (int d = 0; d < head_dim; ++d) {
      float sum = acc[d] * correction;
      for (int t = 0; t < count; ++t) {
        sum = __builtin_fmaf(p[t], cache.half_value(begin + t, d), sum);
      }
      acc[d] = sum;
    }
    return;
  }
  float weight[kChunkTokens];
  uint32_t bits = 0;
  for (int t = 0; t < count; ++t) {
    weight[t] = p[t] * cache.value_scale(begin + t);
    const uint32_t w = __builtin_bit_cast(uint32_t, weight[t]);
    if (w > bits) bits = w;
  }
  const float largest = __builtin_bit_cast(float, bits);
  const bool is_tiny = largest < kQuantMin;
  const float inverse = is_tiny ? 0.0f : kQuantMax15 / largest;
  const float scale = is_tiny ? 0.0f : largest * (1.0f / kQuantMax15);
  int16_t quant[kChunkTokens];
  for (int t = 0; t < count; ++t) quant[t] = round_int16(weight[t] * inverse);
  for (int d = 0; d < head_dim; ++d) {
    int32_t sum = 0;
    for (int t = 0; t < count; ++t) sum += quant[t] * cache.int8_value(begin + t, d);
    acc[d] = __builtin_fmaf(static_cast<float>(sum), scale, acc[d] * correction);
  }
}

void add_chunk(const Cache& cache, const Query& q, int begin, int count, State& s) {
  float p[kChunkTokens] = {};
  float max = s.max;
  for (int t = 0; t < count; ++t) {
    p[t] = score(cache, q, begin + t);
    max = max > p[t] ? max : p[t];
  }
  float lane[kBlockSize] = {};
  for (int t = 0; t < count; ++t) p[t] = exp2_of(p[t] - max);
  for (int i = 0; i < kBlockSize; ++i) lane[i] = (p[i] + p[16 + i]) + (p[32 + i] + p[48 + i]);
  const float correction = exp2_of(s.max - max);
  s.max = max;
  s.sum = __builtin_fmaf(s.sum, correction, sum_lanes(lane, kBlockSize));
  add_values(cache, p, begin, count, correction, s.acc);
}

float int8_tile_score(const Cache& cache, const Query& q, int token) {
  int32_t dot = 0;
  for (int d = 0; d < cache.kv.head_dim; ++d) dot += q.quant[d] * cache.tile_key(token, d);
  return (static_cast<float>(dot) * q.scale) * cache.key_scale(token);
}

void run_int8_tile_split(const Cache& cache, const Query& q, int split, int visible, State& s) {
  const int begin = split * kSplitTokens;
  const int count = visible - begin < kSplitTokens ? visible - begin : kSplitTokens;
  float p[kSplitTokens];
  s.max = -kInfinity;
  for (int t = 0; t < count; ++t) {
    p[t] = int8_tile_score(cache, q, begin + t);
    s.max = s.max > p[t] ? s.max : p[t];
  }
  float lane[kBlockSize] = {};
  uint32_t bits = 0;
  for (int t = 0; t < count; ++t) {
    p[t] = exp2_of(p[t] - s.max);
    lane[t % kBlockSize] += p[t];
    p[t] *= cache.value_scale(begin + t);
    const uint32_t w = __builtin_bit_cast(uint32_t, p[t]);
    bits = w > bits ? w : bits;
  }
  s.sum = sum_lanes(lane, kBlockSize);
  const float largest = __builtin_bit_cast(float, bits);
  const bool is_tiny = largest < kQuantMin;
  const float inverse = is_tiny ? 0.0f : kQuantMax16 / largest;
  int weights[kSplitTokens];
  for (int t = 0; t < count; ++t) {
    const int w = round_int16(p[t] * inverse);
    weights[t] = w < 0 ? 0 : w;  // NaN, which the scale keeps
  }
  const float scale = is_tiny ? 0.0f : largest * (1.0f / kQuantMax16);
  for (int d = 0; d < cache.kv.head_dim; ++d) {
    int32_t dot = 0;
    for (int t = 0; t < count; ++t) dot += weights[t] * cache.tile_value(begin + t, d);
    s.acc[d] = static_cast<float>(dot) * scale;
  }
}

float bf16_score(const Cache& cache, const Query& q, int token) {
  const int depth = bf16_depth(cache.kv.head_dim);
  float sum = 0.0f;
  for (int part = 0; part < cache.kv.head_dim; part += depth) {
    float chain[2] = {};
    for (int d = part; d < part + depth; ++d) {
      chain[d % 2] = __builtin_fmaf(q.value[d], cache.bf16_key(token, d), chain[d % 2]);
    }
    sum += chain[0] + chain[1];
  }
  return sum;
}

void run_bf16_split(const Cache& cache, const Query& q, int split, int visible, State& s) {
  constexpr int kTokens = 32;  // that a tile multiplies
  const int begin = split * kSplitTokens;
  const int count = visible - begin < kSplitTokens ? visible - begin : kSplitTokens;
  float p[kSplitTokens];
  s.max = -kInfinity;
  for (int t = 0; t < count; ++t) {
    p[t] = bf16_score(cache, q, begin + t);
    s.max = s.max > p[t] ? s.max : p[t];
  }
  float lane[2 * kBlockSize] = {};
  for (int t = 0; t < count; ++t) {
    p[t] = exp2_coarse(ScalarExp{{p[t] - s.max}}).v;
    lane[t % (2 * kBlockSize)] += p[t];
    p[t] = bf16_to_float(float_to_bf16(p[t]));
  }
  s.sum = sum_lanes(lane, 2 * kBlockSize);
  for (int d = 0; d < cache.kv.head_dim; ++d) {
    s.acc[d] = 0.0f;
    for (int first = 0; first < count; first += kTokens) {
      float chain[2] = {};
      for (int t = first; t < count && t < first + kTokens; ++t) {
        chain[t % 2] = __builtin_fmaf(p[t], cache.bf16_value(begin + t, d), chain[t % 2]);
      }
      s.acc[d] += chain[0] + chain[1];
    }
  }
}

void run_split(const Cache& cache, const Query& q, int split, int visible, State& s) {
  if (cache.kv.format == KVFormat::kBf16Tiles) return run_bf16_split(cache, q, split, visible, s);
  if (cache.kv.format == KVFormat::kInt8Tiles) {
    return run_int8_tile_split(cache, q, split, visible, s);
  }
  for (int d = 0; d < cache.kv.head_dim; ++d) s.acc[d] = 0.0f;
  s.max = -kInfinity;
  s.sum = 0.0f;
  const int begin = split * kSplitTokens;
  const int end = visible < begin + kSplitTokens ? visible : begin + kSplitTokens;
  for (int t = begin; t < end; t += kChunkTokens) {
    add_chunk(cache, q, t, end - t < kChunkTokens ? end - t : kChunkTokens, s);
  }
}

void merge(State& total, const State& s, int head_dim) {
  const float max = total.max > s.max ? total.max : s.max;
  const float a = exp2_of(total.max - max);
  const float b = exp2_of(s.max - max);
  for (int d = 0; d < head_dim; ++d) {
    total.acc[d] = __builtin_fmaf(s.acc[d], b, total.acc[d] * a);
  }
  total.max = max;
  total.sum = __builtin_fmaf(s.sum, b, total.sum * a);
}

void write_output(const State& total, int head_dim, float* out) {
  const float inverse = 1.0f / total.sum;
  for (int d = 0; d < head_dim; ++d) out[d] = total.acc[d] * inverse;
}

// One query of one head of a task.
struct Row {
  int visible;  // keys that it sees
  float* out;
  const float* q;
  float* partial;  // of split 0, or null
  int64_t partial_step;

  Row(const AttentionArgs& args, const AttentionTask& task, int row) {
    const int group = args.num_heads / args.kv.num_kv_heads;
    const int query = task.query_begin + row / group;
    const int64_t head = task.kv_head * group + row % group;
    const int64_t offset = (query * int64_t{args.num_heads} + head) * args.kv.head_dim;
    const int64_t stride = partial_stride(args.kv.head_dim);
    visible = task.is_shared ? (task.split_begin + task.split_count) * kSplitTokens
                             : args.batch->seq_lens[task.seq] -
                                   args.batch->query_start_loc[task.seq + 1] + query + 1;
    out = args.out + offset;
    q = args.q + offset;
    partial_step = task.partial_step * stride;
    partial = task.partial < 0 ? nullptr : args.partials + (task.partial + row) * stride;
    if (partial) partial -= task.split_begin * partial_step;
  }
};

void run_row(const AttentionArgs& args, const AttentionTask& task, const Row& row) {
  const int head_dim = args.kv.head_dim;
  const Cache cache{args.kv, args.batch->block_tables + task.seq * args.batch->block_table_stride,
                    task.kv_head};
  Query q;
  load_query(row.q, args.kv, args.scale * kLog2E, q);
  State total;
  for (int split = task.split_begin; split < task.split_begin + task.split_count; ++split) {
    if (split * kSplitTokens >= row.visible) break;
    State s;
    run_split(cache, q, split, row.visible, s);
    if (row.partial) {
      float* out = row.partial + split * row.partial_step;
      for (int d = 0; d < head_dim; ++d) out[d] = s.acc[d];
      out[head_dim] = s.max;
      out[head_dim + 1] = s.sum;
    } else if (split == 0) {
      total = s;
    } else {
      merge(total, s, head_dim);
    }
  }
  if (!row.partial && row.visible > 0) write_output(total, head_dim, row.out);
}

void merge_row(const AttentionArgs& args, const Row& row) {
  const int head_dim = args.kv.head_dim;
  State total;
  for (int split = 0; split * kSplitTokens < row.visible; ++split) {
    const float* in = row.partial + split * row.partial_step;
    State s;
    for (int d = 0; d < head_dim; ++d) s.acc[d] = in[d];
    s.max = in[head_dim];
    s.sum = in[head_dim + 1];
    if (split == 0) {
      total = s;
    } else {
      merge(total, s, head_dim);
    }
  }
  if (row.visible > 0) write_output(total, head_dim, row.out);
}

}  // namespace

void attention(const AttentionArgs& args, Worker& worker) {
  const AttentionSchedule& schedule = *args.schedule;
  const int group = args.num_heads / args.kv.num_kv_heads;
  for (int64_t i = next_task(worker); i < schedule.num_tasks; i = next_task(worker)) {
    const AttentionTask& task = schedule.tasks[i];
    for (int r = 0; r < task.query_count * group; ++r) {
      const Row row(args, task, r);
      if (row.visible <= 0) {
        for (int d = 0; d < args.kv.head_dim; ++d) row.out[d] = 0.0f;
      } else {
        run_row(args, task, row);
      }
    }
  }
  if (schedule.num_merges == 0) return;
  barrier(worker);
  for (int64_t i = next_task(worker); i < schedule.num_merges; i = next_task(worker)) {
    const AttentionTask& task = schedule.merges[i];
    for (int r = 0; r < task.query_count * group; ++r) merge_row(args, Row(args, task, r));
  }
}

}  // namespace caudal::ref
