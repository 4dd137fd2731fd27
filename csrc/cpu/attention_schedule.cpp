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
    for (int i = 0; i < batch_.num_seqs; ++i) {
      const Sequence seq = sequence(i);
      if (seq.num_queries > 0) add_sequence(seq);
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
    const int64_t rows = int64_t{query_count} * group_;
    const int64_t cost = task_cost(context, rows);
    AttentionTask task{seq, 0, query_begin, query_count, 0, num_splits, -1};
    const int64_t partials_per_head = num_splits * rows;
    const int64_t num_partials = num_partials_ + partials_per_head * num_kv_heads_;
    const bool is_too_long = 2 * cost > 3 * target_ && num_splits > 1;
    if (!is_too_long || num_partials > buffers_.max_partials) {
      buffers_.items.push_back({cost, task, 0});
      return;
    }
    task.partial = static_cast<int32_t>(num_partials_);
    num_partials_ = num_partials;
    for (int h = 0; h < num_kv_heads_; ++h) {
      buffers_.merges.push_back(for_head(task, h, partials_per_head));
    }
    const auto pieces = static_cast<int>(std::min<int64_t>(num_splits, ceil_div(cost, target_)));
    for (int i = 0; i < pieces; ++i) {
      AttentionTask piece = task;
      piece.split_begin = num_splits * i / pieces;
      piece.split_count = num_splits * (i + 1) / pieces - piece.split_begin;
      piece.partial += static_cast<int32_t>(piece.split_begin * rows);
      const int64_t piece_cost = task_cost(int64_t{piece.split_count} * kSplitTokens, rows);
      buffers_.items.push_back({piece_cost, piece, partials_per_head});
    }
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
  constexpr int64_t kMaxSplits = 2048;
  return num_heads * std::min(2 * ceil_div(max_context, kSplitTokens), kMaxSplits);
}

AttentionSchedule make_attention_schedule(const Batch& batch, int num_heads, int num_kv_heads,
                                          int num_threads, AttentionBuffers& buffers) {
  return Builder(batch, num_heads, num_kv_heads, num_threads, buffers).build();
}

}  // namespace caudal
