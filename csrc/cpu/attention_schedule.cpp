#include "attention_schedule.h"

#include <algorithm>
#include <numeric>

namespace caudal {
namespace {

// A task's cost is its blocks of keys x (rows + kLoadRows): reading a block from memory takes as
// long as computing it for about this many rows.
constexpr int64_t kLoadRows = 12;
// Tasks per thread that keep the threads balanced when they claim the largest first.
constexpr int64_t kTasksPerThread = 4;
// Below this many rows a tile wastes time on widening keys and values.
constexpr int64_t kMinTileRows = 48;
// Rows of one register tile of the kernels.
constexpr int kRegisterRows = 6;
// Fewer rows of sequences with blocks in common attend to these one by one.
constexpr int kMinSharedRows = 9;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t task_cost(int64_t tokens, int64_t rows) {
  return ceil_div(tokens, kBlockSize) * (rows + kLoadRows);
}

struct Sequence {
  int index;
  int query_begin;
  int num_queries;
  int context;  // keys that the last query sees
};

class Builder {
 public:
  Builder(const Batch& batch, int num_heads, int num_kv_heads, int num_threads,
          AttentionBuffers& buffers)
      : batch_(batch),
        group_(num_heads / num_kv_heads),
        num_kv_heads_(num_kv_heads),
        buffers_(buffers) {
    buffers_.items.clear();
    buffers_.tasks.clear();
    buffers_.merges.clear();
    int64_t total = 0;
    for (int i = 0; i < batch.num_seqs; ++i) {
      const Sequence seq = sequence(i);
      if (seq.num_queries > 0) total += seq_cost(seq);
    }
    total *= num_kv_heads;
    // A single thread has nothing to balance.
    target_ = num_threads > 1 ? total / (kTasksPerThread * num_threads) : total;
    target_ = std::max<int64_t>(target_, 1);
  }

  AttentionSchedule build() {
    for (int i = 0; i < batch_.num_seqs;) {
      const int num_shared = add_shared(i);
      if (num_shared == 0 && sequence(i).num_queries > 0) add_sequence(sequence(i));
      i += std::max(1, num_shared);
    }
    std::sort(buffers_.items.begin(), buffers_.items.end(), [](const auto& a, const auto& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.task.query_begin < b.task.query_begin;
    });
    // Heads of a block are adjacent in memory, hence the heads of one tile in a row.
    for (const auto& item : buffers_.items) {
      for (int h = 0; h < num_kv_heads_; ++h) {
        buffers_.tasks.push_back(for_head(item.task, h, item.partials_per_head));
      }
    }
    return {buffers_.tasks.data(), static_cast<int>(buffers_.tasks.size()), buffers_.merges.data(),
            static_cast<int>(buffers_.merges.size())};
  }

 private:
  Sequence sequence(int i) const {
    const int begin = batch_.query_start_loc[i];
    return {i, begin, batch_.query_start_loc[i + 1] - begin, batch_.seq_lens[i]};
  }

  int64_t seq_cost(const Sequence& seq) const {
    const int64_t tiles = ceil_div(int64_t{seq.num_queries} * group_, kMaxTaskRows);
    const int64_t mean_context = std::max(1, seq.context - seq.num_queries / 2);
    const int64_t rows_per_tile = ceil_div(int64_t{seq.num_queries} * group_, tiles);
    return tiles * task_cost(mean_context, rows_per_tile);
  }

  // Queries per tile: as many as fit, fewer if the tasks would become too few.
  int tile_queries(const Sequence& seq) const {
    const int64_t most = std::max(1, kMaxTaskRows / group_);
    const int64_t blocks = ceil_div(std::max(1, seq.context), kBlockSize);
    const int64_t least = std::min(most, ceil_div(kMinTileRows, group_));
    const int64_t wanted = std::clamp((target_ / blocks - kLoadRows) / group_, least, most);
    const int64_t tiles = ceil_div(seq.num_queries, wanted);
    const int64_t even = ceil_div(seq.num_queries, tiles);
    // Whole register tiles where that costs no further tile.
    const int64_t unit = kRegisterRows / std::gcd(kRegisterRows, group_);
    return static_cast<int>(std::min(most, ceil_div(even, unit) * unit));
  }

  void add_sequence(const Sequence& seq) {
    const int step = tile_queries(seq);
    for (int first = 0; first < seq.num_queries; first += step) {
      const int count = std::min(step, seq.num_queries - first);
      const int context = seq.context - seq.num_queries + first + count;
      add_tile(seq.index, seq.query_begin + first, count, std::max(0, context));
    }
  }

  void add_tile(int seq, int query_begin, int query_count, int context) {
    const int num_splits = static_cast<int>(ceil_div(context, kSplitTokens));
    const int rows = query_count * group_;
    const int64_t cost = task_cost(context, rows);
    AttentionTask task{.seq = seq,
                       .kv_head = 0,
                       .query_begin = query_begin,
                       .query_count = query_count,
                       .split_begin = 0,
                       .split_count = num_splits,
                       .partial = -1,
                       .partial_step = rows,
                       .is_shared = false};
    const bool is_too_long = 2 * cost > 3 * target_ && num_splits > 1;
    const int64_t per_head = int64_t{num_splits} * rows;
    if (!is_too_long || !reserve(per_head, task)) {
      buffers_.items.push_back({cost, task, 0});
      return;
    }
    add_merges(task, per_head);
    add_pieces(task, per_head);
  }

  // Takes partial rows for all heads; false if there are not enough.
  bool reserve(int64_t per_head, AttentionTask& task) {
    const int64_t num_partials = num_partials_ + per_head * num_kv_heads_;
    if (num_partials > buffers_.max_partials) return false;
    task.partial = static_cast<int32_t>(num_partials_);
    num_partials_ = num_partials;
    return true;
  }

  void add_merges(const AttentionTask& task, int64_t per_head) {
    for (int h = 0; h < num_kv_heads_; ++h) buffers_.merges.push_back(for_head(task, h, per_head));
  }

  // A task with partial results, cut so that threads stay balanced.
  void add_pieces(const AttentionTask& task, int64_t per_head) {
    const int64_t rows = int64_t{task.query_count} * group_;
    const int64_t cost = task_cost(int64_t{task.split_count} * kSplitTokens, rows);
    const auto pieces =
        static_cast<int>(std::min<int64_t>(task.split_count, ceil_div(cost, target_)));
    for (int i = 0; i < pieces; ++i) {
      AttentionTask piece = task;
      const int begin = task.split_count * i / pieces;
      piece.split_begin += begin;
      piece.split_count = task.split_count * (i + 1) / pieces - begin;
      piece.partial += begin * task.partial_step;
      const int64_t piece_cost = task_cost(int64_t{piece.split_count} * kSplitTokens, rows);
      buffers_.items.push_back({piece_cost, piece, per_head});
    }
  }

  // ---------------------------------------------------------------- shared blocks

  // Splits at the beginning of two sequences that lie in the same blocks, before any query.
  int num_shared_splits(int a, int b) const {
    constexpr int kSplitBlocks = kSplitTokens / kBlockSize;
    const int32_t* first = batch_.block_tables + a * batch_.block_table_stride;
    const int32_t* second = batch_.block_tables + b * batch_.block_table_stride;
    const int most = std::min(first_context(a), first_context(b)) / kSplitTokens * kSplitBlocks;
    const auto [end, ignored] = std::mismatch(first, first + most, second);
    return static_cast<int>(end - first) / kSplitBlocks;
  }

  // Keys that all queries of a sequence see.
  int first_context(int i) const { return batch_.seq_lens[i] - sequence(i).num_queries + 1; }

  // One query, or a few that were guessed.
  bool is_decoding(int i) const {
    constexpr int kMaxQueries = 16;
    return i < batch_.num_seqs && sequence(i).num_queries >= 1 &&
           sequence(i).num_queries <= kMaxQueries;
  }

  // The number of sequences from `first` on that were added together; 0 if it has nothing in common
  // with enough of those behind it.
  int add_shared(int first) {
    if (!is_decoding(first) || !is_decoding(first + 1)) return 0;
    const int num_splits = num_shared_splits(first, first + 1);
    if (num_splits == 0) return 0;
    int count = 0;
    int num_queries = 0;
    while (is_decoding(first + count) &&
           (num_queries + sequence(first + count).num_queries) * group_ <= kMaxTaskRows &&
           (count < 2 || num_shared_splits(first, first + count) >= num_splits)) {
      num_queries += sequence(first + count).num_queries;
      ++count;
    }
    const int rows = num_queries * group_;
    if (count < 2 || rows < kMinSharedRows) return 0;
    int most_splits = 0;
    for (int i = first; i < first + count; ++i) {
      most_splits = std::max(most_splits, num_all_splits(i));
    }
    const int64_t per_head = int64_t{most_splits} * rows;
    AttentionTask task{.seq = first,
                       .kv_head = 0,
                       .query_begin = batch_.query_start_loc[first],
                       .query_count = num_queries,
                       .split_begin = 0,
                       .split_count = num_splits,
                       .partial = -1,
                       .partial_step = rows,
                       .is_shared = true};
    if (!reserve(per_head, task)) return 0;
    add_pieces(task, per_head);
    for (int i = 0; i < count; ++i) add_rest(task, sequence(first + i), per_head);
    return count;
  }

  int num_all_splits(int seq) const {
    return static_cast<int>(ceil_div(batch_.seq_lens[seq], kSplitTokens));
  }

  // What a sequence of a shared task has for itself, and the merge of both.
  void add_rest(const AttentionTask& shared, const Sequence& seq, int64_t per_head) {
    AttentionTask task = shared;
    task.is_shared = false;
    task.seq = seq.index;
    task.query_begin = seq.query_begin;
    task.query_count = seq.num_queries;
    task.partial += (seq.query_begin - shared.query_begin) * group_;
    add_merges(task, per_head);
    task.split_begin = shared.split_count;
    task.split_count = num_all_splits(task.seq) - shared.split_count;
    task.partial += shared.split_count * task.partial_step;
    if (task.split_count > 0) add_pieces(task, per_head);
  }

  static AttentionTask for_head(AttentionTask task, int head, int64_t partials_per_head) {
    task.kv_head = head;
    if (task.partial >= 0) task.partial += static_cast<int32_t>(head * partials_per_head);
    return task;
  }

  const Batch& batch_;
  const int group_;
  const int num_kv_heads_;
  AttentionBuffers& buffers_;
  int64_t target_ = 1;
  int64_t num_partials_ = 0;
};

}  // namespace

int64_t max_partial_rows(int num_heads, int64_t max_context) {
  // Sequences with blocks in common have more splits than the cache.
  constexpr int64_t kMinSplits = 512;
  constexpr int64_t kMaxSplits = 2048;
  return num_heads * std::clamp(2 * ceil_div(max_context, kSplitTokens), kMinSplits, kMaxSplits);
}

AttentionSchedule make_attention_schedule(const Batch& batch, int num_heads, int num_kv_heads,
                                          int num_threads, AttentionBuffers& buffers) {
  return Builder(batch, num_heads, num_kv_heads, num_threads, buffers).build();
}

}  // namespace caudal
