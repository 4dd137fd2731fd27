// What a kernel may see: plain structs, raw pointers, and the worker that runs it.
//
// Every kernel has the shape `void f(const Args&, Worker&)` and is entered by all threads of the
// team at once. Work is claimed dynamically (`next_task`), so that a core that is busy with the
// server slows one thread and not the step. This header is included by object files with different
// ISA flags: it must hold no inline function that the linker could merge across them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace caudal {

class Team;

// One thread of the team inside a parallel region.
struct Worker {
  int index;
  int count;
  Team* team;
  std::byte* scratch;  // private to this thread, 64-byte aligned, kept between calls
  size_t scratch_bytes;
};

// Wait for all threads; also resets the task counter to 0.
void barrier(Worker&);
// Claim the next task number 0, 1, 2 … since the last barrier.
int64_t next_task(Worker&);
// Claim one of `count` tasks, or -1. Every thread has a share of neighbouring tasks that it takes in
// order, so that it reads memory in order and keeps to the tokens whose activations it made itself;
// when its share is done it takes tasks from the end of others' shares.
int64_t claim_task(Worker&, int64_t count);

constexpr int kBlockSize = 16;  // tokens per KV block

// LinearArgs.panels holds this many bytes per 32 columns and token (tokens rounded up to 64).
constexpr int64_t kPanelBytesPerBlock = 320;

// One step's ragged batch (see BatchArrays in ops/interface.py for shapes).
struct Batch {
  int num_tokens;
  int num_seqs;
  int num_logits;
  const int32_t* input_ids;
  const int32_t* positions;
  const int32_t* slot_mapping;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  int64_t block_table_cols;  // readable entries of a row
  const int32_t* logits_indices;
};

// How a (block, head) of the KV cache lies in memory, contiguously:
//   kF16:   K [head_dim][16 tokens] half, V [16 tokens][head_dim] half
//   kInt8:  K [head_dim/2][16][2], V [8 token pairs][head_dim][2], float k_scale[16], v_scale[16]
//   Operands of a tile unit, which only kernels with `has_tiles` read:
//   kInt8Tiles: K [head_dim/4][16][4], V [4 token quads][head_dim][4], scales as for kInt8
//   kBf16Tiles: K [head_dim/2][16][2], V [8 token pairs][head_dim][2], bf16. A value is always finite; a
//           token with one that was not has a NaN in its key.
enum class KVFormat : int32_t { kF16 = 0, kInt8 = 1, kInt8Tiles = 2, kBf16Tiles = 3 };

namespace {  // not shared between object files
constexpr bool is_int8(KVFormat format) {
  return format == KVFormat::kInt8 || format == KVFormat::kInt8Tiles;
}
constexpr bool is_tiled(KVFormat format) {
  return format == KVFormat::kInt8Tiles || format == KVFormat::kBf16Tiles;
}
// Bytes of one key or value component.
constexpr int kv_value_bytes(KVFormat format) { return is_int8(format) ? 1 : 2; }
}  // namespace

// Paged KV cache of one layer.
struct KVLayer {
  std::byte* base;
  int64_t block_stride;  // bytes from one block to the next
  int64_t head_stride;   // bytes from one head to the next inside a block
  int num_kv_heads;
  int head_dim;
  KVFormat format;
};

struct RopeCacheArgs {
  const Batch* batch;
  KVLayer kv;
  const float* qkv;  // [num_tokens, qkv_stride]: q heads, k heads, v heads
  int64_t qkv_stride;
  float* q_out;  // [num_tokens, num_heads * head_dim]
  int num_heads;
  int rope_dim;
  bool interleaved;
  const float* cos_sin;  // [num_tokens][2][rope_dim / 2], made once per step by rope_table
  const float* q_norm;   // [head_dim] or null
  const float* k_norm;
  float eps;
};

struct RopeTableArgs {
  const Batch* batch;
  const float* inv_freq;  // [rope_dim / 2]
  int rope_dim;
  float attention_factor;
  float* cos_sin;
};

// A unit of attention work; the list is made once per step and serves every layer.
struct AttentionTask {
  int32_t seq;
  int32_t kv_head;
  int32_t query_begin;  // token index in the batch
  int32_t query_count;
  int32_t split_begin;  // in units of the fixed split length
  int32_t split_count;
  int32_t partial;       // row of the first partial result, or -1: the task has all splits
  int32_t partial_step;  // rows from one split's partial results to the next
  // The queries are the only ones of as many sequences, from `seq` on, whose caches have these splits
  // in common: each sees all of them.
  bool is_shared;
};

struct AttentionSchedule {
  const AttentionTask* tasks;
  int num_tasks;
  const AttentionTask* merges;  // (seq, kv_head, query) whose partials merge after a barrier
  int num_merges;
};

struct AttentionArgs {
  const Batch* batch;
  const AttentionSchedule* schedule;
  KVLayer kv;
  const float* q;  // [num_tokens, num_heads * head_dim]
  float* out;      // same shape
  int num_heads;
  float scale;
  float* partials;  // per partial row: head_dim accumulators, then running max and sum
};

struct SampleArgs {
  float* logits;  // [rows of logits, vocab], may be overwritten
  int64_t logits_stride;
  int num_rows;
  const int32_t* logit_rows;  // [num_rows] row of logits, each at most once
  int vocab;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* presence_penalty;
  const float* frequency_penalty;
  const float* repetition_penalty;
  const uint64_t* seed;
  const int64_t* position;
  const int32_t* bias_indptr;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* history_indptr;
  const int32_t* history_ids;
  const int32_t* history_counts;
  const int32_t* num_logprobs;
  const int32_t* target_ids;
  const int32_t* mask_rows;    // [num_rows] row of mask_words, or -1: every id may be chosen
  const uint32_t* mask_words;  // [masks, ceil(vocab / 32)] a bit per id, set where it may be chosen
  int max_logprobs;  // columns of top_ids and top_logprobs
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
};

// The largest allowed logit of rows, the lowest id among equals: what a greedy row samples.
struct BestAllowedArgs {
  const float* logits;  // [rows of logits, vocab]
  int64_t logits_stride;
  int num_rows;
  int vocab;
  const int32_t* logit_rows;   // [num_rows] row of logits
  const uint32_t* mask_words;  // [num_rows, ceil(vocab / 32)] a bit per id, set where it is allowed
  int32_t* token_ids;          // [num_rows] -1 if nothing that is allowed is possible
};

// A packed weight matrix. Rows are padded to a multiple of 16 and stored in groups of 16, each
// group as cols / 32 blocks:
//   w4 (320 B): byte 64*i + 4*r + j: low nibble k = 4i + j, high nibble k = 16 + 4i + j
//               (i 0..3, row r 0..15, j 0..3); then half d[16], half m[16]; value = d*q + m
//   w8 (544 B): byte 32*p + 2*r + (k & 1), p = k / 2 (0..15); then half d[16]; value = d*q
//   f16, f32:   [k 0..31][16 rows]
// After the groups of w4 and w8 come kExponentBytes: an int32 exponent e, and zeros. It brings the
// largest |value| * 2^e into [0.99, 1.98); kNotFinite if a value is infinite or NaN.
enum class WeightFormat : int32_t { kW4 = 0, kW8 = 1, kF16 = 2, kF32 = 3 };

constexpr int64_t kExponentBytes = 64;
constexpr int32_t kNotFinite = 1 << 20;

struct PackedMatrix {
  WeightFormat format;
  int64_t rows;
  int64_t cols;
  const std::byte* data;
  int32_t exponent;  // of w4 and w8
};

// What w4 and w8 multiply, see numerics.h: int8 and int12 are forms for w4, beside which w8 meets 13
// bits; bf16 rounds the weights too.
enum class Activations : int32_t { kInt8 = 0, kInt12 = 1, kBf16 = 2 };

// kPanels: x is what a linear with gates has left.
enum class Prologue : int32_t { kNone = 0, kRmsNorm = 1, kSiluMul = 2, kPanels = 3 };

struct LinearArgs {
  const float* x;  // [num_tokens, x_stride]
  int64_t x_stride;
  int num_tokens;
  Prologue prologue;  // applied to x while it is quantised into panels
  const float* norm_weight;
  float eps;
  const PackedMatrix* segments;  // stacked by rows into the output columns
  int num_segments;
  const float* bias;      // [sum of rows] or null
  const float* residual;  // [num_tokens, out_stride] or null; may be `out`
  float* out;             // [num_tokens, out_stride]
  int64_t out_stride;
  std::byte* panels;  // quantised activations, shared by the team
  Activations activations;
  // If not 0, the one segment has twice as many rows, and neither bias nor residual follows: output r is
  // silu(row r) * row (gate_rows + r), and `out` receives the panels of a linear whose one segment is of
  // the format gate_reader. A multiple of 32. Only kernels with `has_gates` do this.
  int64_t gate_rows;
  WeightFormat gate_reader;
};

struct RmsNormArgs {
  const float* x;
  int64_t x_stride;
  int num_tokens;
  int cols;
  const float* weight;
  float eps;
  float* out;
  int64_t out_stride;
};

struct SiluMulArgs {
  const float* gate_up;  // [num_tokens, 2 * cols]
  int num_tokens;
  int cols;
  float* out;
};

struct EmbedArgs {
  const Batch* batch;
  PackedMatrix table;
  float* out;
  int64_t out_stride;
};

// One instruction set's kernels. `score` is built without ISA flags: 0 refuses.
struct KernelTable {
  const char* name;
  int (*score)();
  bool has_tiles;  // its attention reads the tiled KV formats
  bool has_bf16;   // its linear multiplies bf16,
  bool has_gates;  // and then joins gates with what they open
  Activations activations;            // its best ones,
  Activations sensitive_activations;  // and for products whose rounding costs a model the most
  void (*embed)(const EmbedArgs&, Worker&);
  void (*rms_norm)(const RmsNormArgs&, Worker&);
  void (*silu_mul)(const SiluMulArgs&, Worker&);
  void (*linear)(const LinearArgs&, Worker&);
  void (*rope_table)(const RopeTableArgs&, Worker&);
  void (*rope_and_cache)(const RopeCacheArgs&, Worker&);
  void (*attention)(const AttentionArgs&, Worker&);
  void (*sample)(const SampleArgs&, Worker&);
  void (*best_allowed)(const BestAllowedArgs&, Worker&);
};

}  // namespace caudal
