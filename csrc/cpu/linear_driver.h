// Splits one linear into tasks: first the activations into panels, then rows x tokens.
//
// Included by object files with different ISA flags: functions are in an anonymous namespace (see
// numerics.h) and the structs have no member functions.
// A panel holds the activations of one tile of up to 16 tokens, block of 32 values by block, in
// the order in which an ISA's kernel reads them. The bytes per token and block are the same for all
// ISAs, so the owner of LinearArgs::panels need not know which one runs.
#pragma once

#include "kernels.h"

namespace caudal {

// Tokens are split evenly into the fewest tiles, so that no tile is left with a single token.
struct Tiling {
  int num_tokens;
  int num_tiles;
};

// What a panel holds per token and block of 32 values:
enum PanelKind : int {
  kInt8Panel,   // 32 int8, then scale, scale * sum
  kInt13Panel,  // 32 int16, then scale
  kFloatPanel,  // 32 floats
  kInt12Panel,  // 32 int8 (high parts), 32 int8 (low parts), then scale, scale * sum
  kBf16Panel,    // 32 bf16
  kBf16W4Panel,  // 32 bf16 in the order of w4's nibbles, see amx/linear_quantize.cpp
  kNumPanelKinds,
};

// Where the panels of each kind start; kinds that no segment uses are null.
struct PanelSet {
  std::byte* base[kNumPanelKinds];
  int64_t num_blocks;
  Tiling tiling;
};

// One call of a kernel: some groups of 16 rows against one tile of tokens.
struct TileArgs {
  const std::byte* weights;  // first group
  int64_t num_blocks;
  int64_t num_groups;
  int64_t num_rows;  // rows that exist; the last group may be padded
  const std::byte* panel;
  int num_tokens;
  Activations activations;
  int32_t exponent;       // of the matrix
  int64_t up_groups;      // from a group of gates to the one that they open; 0: there are no gates
  std::byte* gate_panel;  // at the first of their blocks
  WeightFormat gate_reader;
  const float* bias;      // at the first row, or null
  const float* residual;  // at the first row of the first token, or null
  float* out;             // likewise
  int64_t stride;         // of out and residual
};

namespace {

constexpr int kRowsPerGroup = 16;
constexpr int kMaxTileTokens = 16;
constexpr int kBlockCols = 32;
constexpr int64_t kMaxTilesPerTask = 8;
constexpr int64_t kMinWorkspaceBytes = 1 << 20;

// Bytes a token takes in a panel, per block of 32 values, by PanelKind.
constexpr int64_t kPanelBytes[kNumPanelKinds] = {40, 68, 128, 72, 64, 64};
// Bytes of a block of 16 rows x 32 columns, by WeightFormat.
constexpr int64_t kWeightBytes[] = {320, 544, 1024, 2048};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t tile_begin(const Tiling& t, int64_t tile) { return tile * t.num_tokens / t.num_tiles; }
inline int64_t tile_of(const Tiling& t, int64_t token) {
  return ((token + 1) * t.num_tiles - 1) / t.num_tokens;
}

inline int panel_kind(WeightFormat format, Activations activations) {
  switch (format) {
    case WeightFormat::kW4:
      return activations == Activations::kBf16    ? kBf16W4Panel
             : activations == Activations::kInt12 ? kInt12Panel
                                                  : kInt8Panel;
    case WeightFormat::kW8:
      return activations == Activations::kBf16 ? kBf16Panel : kInt13Panel;
    case WeightFormat::kF16:
    case WeightFormat::kF32:
      return kFloatPanel;
  }
  return kFloatPanel;
}

inline std::byte* tile_panel(const PanelSet& set, int kind, int64_t tile) {
  return set.base[kind] + tile_begin(set.tiling, tile) * set.num_blocks * kPanelBytes[kind];
}

// Where the gates of a tile of `num_tokens` go from row `row` on; null if there are none.
inline std::byte* gate_panel(const LinearArgs& args, int64_t first_token, int64_t num_tokens,
                             int64_t row) {
  if (args.gate_rows == 0) return nullptr;
  const int64_t before = first_token * (args.gate_rows / kBlockCols) + row / kBlockCols * num_tokens;
  const int kind = panel_kind(args.gate_reader, args.activations);
  return reinterpret_cast<std::byte*>(args.out) + before * kPanelBytes[kind];
}

// Lays out the panels of all kinds in use from `memory` on; returns the bytes they take.
inline int64_t place_panels(const LinearArgs& args, int tile_tokens, std::byte* memory,
                            PanelSet& set) {
  set.num_blocks = args.segments[0].cols / kBlockCols;
  set.tiling = {args.num_tokens, static_cast<int>(ceil_div(args.num_tokens, tile_tokens))};
  for (int k = 0; k < kNumPanelKinds; ++k) set.base[k] = nullptr;
  int64_t used = 0;
  for (int s = 0; s < args.num_segments; ++s) {
    const int kind = panel_kind(args.segments[s].format, args.activations);
    if (set.base[kind]) continue;
    set.base[kind] = memory + used;
    used += ceil_div(args.num_tokens * set.num_blocks * kPanelBytes[kind], 64) * 64;
  }
  return used;
}

// How the output of one segment is cut into tasks.
struct SegmentTasks {
  int64_t groups;
  int64_t groups_per_task;
  int64_t row_tasks;
  int64_t tiles_per_task;
  int64_t token_tasks;
  int64_t count;  // row_tasks * token_tasks
};

// Row chunks stay in L2 while they meet all tiles of the task, and are small enough that a thread
// slowed by the server leaves its share to the others.
template <class Isa>
SegmentTasks split_segment(const LinearArgs& args, const PackedMatrix& m, const Tiling& tiling,
                           int num_threads) {
  constexpr int64_t kChunkBytes = 96 * 1024;
  SegmentTasks t;
  const bool has_gates = args.gate_rows > 0;
  t.groups = ceil_div(has_gates ? args.gate_rows : m.rows, kRowsPerGroup);
  const int64_t group_bytes =
      m.cols / kBlockCols * kWeightBytes[static_cast<int>(m.format)] * (has_gates ? 2 : 1);
  const int64_t fit = max_of(1, kChunkBytes / group_bytes);
  const int64_t fair = max_of(1, t.groups / (Isa::kTasksPerThread * num_threads));
  t.groups_per_task = min_of(fit, fair);
  if (t.groups_per_task > Isa::kGroupsAtOnce) t.groups_per_task -= t.groups_per_task % Isa::kGroupsAtOnce;
  if (has_gates) t.groups_per_task = ceil_div(t.groups_per_task, 2) * 2;  // a block of the panels
  t.row_tasks = ceil_div(t.groups, t.groups_per_task);
  t.token_tasks = ceil_div(tiling.num_tiles, Isa::tiles_per_task(args.activations));
  t.tiles_per_task = ceil_div(tiling.num_tiles, t.token_tasks);
  t.count = t.row_tasks * t.token_tasks;
  return t;
}

// Runs task `index` of segment `m`, whose outputs start at column `column`.
template <class Isa>
void run_segment_task(const LinearArgs& args, const PanelSet& panels, const PackedMatrix& m,
                      int64_t column, const SegmentTasks& tasks, int64_t index,
                      std::byte* workspace) {
  const int64_t group = index % tasks.row_tasks * tasks.groups_per_task;
  const int64_t first_tile = index / tasks.row_tasks * tasks.tiles_per_task;
  const int64_t last_tile = min_of(panels.tiling.num_tiles, first_tile + tasks.tiles_per_task);
  const int64_t row = group * kRowsPerGroup;
  const int64_t offset = column + row;
  const int64_t num_rows = args.gate_rows > 0 ? args.gate_rows : m.rows;
  TileArgs tiles[kMaxTilesPerTask];
  for (int64_t i = first_tile; i < last_tile; ++i) {
    const int64_t begin = tile_begin(panels.tiling, i);
    TileArgs& tile = tiles[i - first_tile];
    tile.weights = m.data + group * panels.num_blocks * kWeightBytes[static_cast<int>(m.format)];
    tile.num_blocks = panels.num_blocks;
    tile.num_groups = min_of(tasks.groups_per_task, tasks.groups - group);
    tile.num_rows = min_of(num_rows - row, tile.num_groups * kRowsPerGroup);
    tile.num_tokens = static_cast<int>(tile_begin(panels.tiling, i + 1) - begin);
    tile.up_groups = args.gate_rows / kRowsPerGroup;
    tile.gate_panel = gate_panel(args, begin, tile.num_tokens, row);
    tile.gate_reader = args.gate_reader;
    tile.panel = tile_panel(panels, panel_kind(m.format, args.activations), i);
    tile.activations = args.activations;
    tile.exponent = m.exponent;
    tile.bias = args.bias ? args.bias + offset : nullptr;
    tile.residual = args.residual ? args.residual + begin * args.out_stride + offset : nullptr;
    tile.out = args.out + begin * args.out_stride + offset;
    tile.stride = args.out_stride;
  }
  Isa::run_task(m.format, tiles, static_cast<int>(last_tile - first_tile), workspace);
}

template <class Isa>
void run_tiles(const LinearArgs& args, const PanelSet& panels, Worker& worker) {
  // The first half may hold panels.
  std::byte* workspace = worker.scratch + worker.scratch_bytes / 2;
  int64_t num_tasks = 0;
  for (int s = 0; s < args.num_segments; ++s) {
    num_tasks += split_segment<Isa>(args, args.segments[s], panels.tiling, worker.count).count;
  }
  for (int64_t task = claim_task(worker, num_tasks); task >= 0;
       task = claim_task(worker, num_tasks)) {
    int64_t index = task;
    int64_t column = 0;
    const PackedMatrix* segment = args.segments;
    SegmentTasks tasks = split_segment<Isa>(args, *segment, panels.tiling, worker.count);
    while (index >= tasks.count) {
      index -= tasks.count;
      column += segment->rows;
      tasks = split_segment<Isa>(args, *++segment, panels.tiling, worker.count);
    }
    run_segment_task<Isa>(args, panels, *segment, column, tasks, index, workspace);
  }
}

// Isa: static constexpr int kTileTokens: at most kMaxTileTokens; kTasksPerThread: that a product is cut
//        into at least; kGroupsAtOnce: groups that its kernel likes to take together;
//      static int64_t tiles_per_task(Activations): at most kMaxTilesPerTask;
//      static void quantize(const LinearArgs&, const PanelSet&, int64_t token, int64_t count);
//      static void run_task(WeightFormat, const TileArgs* tiles, int num_tiles, std::byte* workspace):
//        the tiles share the weights; the workspace has at least kMinWorkspaceBytes
template <class Isa>
void run_linear(const LinearArgs& args, Worker& worker) {
  // Below this many values every thread quantises all tokens for itself: cheaper than a barrier.
  constexpr int64_t kPrivateValues = 2048;
  constexpr int64_t kTokensPerTask = 4;
  PanelSet panels;
  const int64_t values = args.num_tokens * args.segments[0].cols;
  if (args.num_tokens <= 0) return;
  if (args.prologue == Prologue::kPanels) {
    place_panels(args, Isa::kTileTokens, args.panels, panels);
    const int kind = panel_kind(args.segments[0].format, args.activations);
    panels.base[kind] = reinterpret_cast<std::byte*>(const_cast<float*>(args.x));
    run_tiles<Isa>(args, panels, worker);
    return;
  }
  if (worker.count == 1 || values <= kPrivateValues) {
    const int64_t bytes = place_panels(args, Isa::kTileTokens, worker.scratch, panels);
    if (bytes <= static_cast<int64_t>(worker.scratch_bytes / 2)) {
      Isa::quantize(args, panels, 0, args.num_tokens);
      run_tiles<Isa>(args, panels, worker);
      return;
    }
  }
  place_panels(args, Isa::kTileTokens, args.panels, panels);
  const int64_t step = args.num_tokens >= kTokensPerTask * worker.count ? kTokensPerTask : 1;
  const int64_t num_tasks = ceil_div(args.num_tokens, step);
  for (int64_t task = claim_task(worker, num_tasks); task >= 0;
       task = claim_task(worker, num_tasks)) {
    const int64_t token = task * step;
    Isa::quantize(args, panels, token, min_of(step, args.num_tokens - token));
  }
  barrier(worker);
  run_tiles<Isa>(args, panels, worker);
}

}  // namespace
}  // namespace caudal
