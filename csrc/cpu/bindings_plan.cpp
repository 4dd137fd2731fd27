// The KV cache and the plan.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "bindings.h"
#include "plan.h"

namespace caudal {

Batch batch_from(nb::handle arrays) {
  using Strided = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
  const auto input_ids = field<I32Vector>(arrays, "input_ids");
  const auto positions = field<I32Vector>(arrays, "positions");
  const auto slot_mapping = field<I32Vector>(arrays, "slot_mapping");
  const auto query_start_loc = field<I32Vector>(arrays, "query_start_loc");
  const auto seq_lens = field<I32Vector>(arrays, "seq_lens");
  const auto block_tables = field<Strided>(arrays, "block_tables");
  const auto logits_indices = field<I32Vector>(arrays, "logits_indices");
  const size_t num_tokens = input_ids.size();
  require(num_tokens < (size_t{1} << 30), "input_ids: too long");
  require(positions.size() == num_tokens, "positions: one per input id is needed");
  require(slot_mapping.size() == num_tokens, "slot_mapping: one per input id is needed");
  require(query_start_loc.size() >= 1, "query_start_loc: sequences + 1 values are needed");
  const size_t num_seqs = query_start_loc.size() - 1;
  require(seq_lens.size() == num_seqs, "seq_lens: one per sequence is needed");
  require(block_tables.shape(0) == num_seqs, "block_tables: one row per sequence is needed");
  require(block_tables.shape(1) <= 1 || block_tables.stride(1) == 1,
          "block_tables: rows must be contiguous");
  // A table of one row may have any stride.
  const bool has_stride = num_seqs > 1;
  const auto columns = static_cast<int64_t>(block_tables.shape(1));
  require(!has_stride || block_tables.stride(0) >= columns, "block_tables: rows overlap");
  require(logits_indices.size() < (size_t{1} << 30), "logits_indices: too long");
  return {.num_tokens = static_cast<int>(num_tokens),
          .num_seqs = static_cast<int>(num_seqs),
          .num_logits = static_cast<int>(logits_indices.size()),
          .input_ids = input_ids.data(),
          .positions = positions.data(),
          .slot_mapping = slot_mapping.data(),
          .query_start_loc = query_start_loc.data(),
          .seq_lens = seq_lens.data(),
          .block_tables = block_tables.data(),
          .block_table_stride = has_stride ? block_tables.stride(0) : columns,
          .block_table_cols = columns,
          .logits_indices = logits_indices.data()};
}

namespace {

using Bytes = NumpyArray<uint8_t>;

void check_blocks(const KVCache& cache, const I32Vector& ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    require(ids.data()[i] >= 0 && ids.data()[i] < cache.shape().num_blocks,
            "block_ids: outside the KV cache");
  }
}

Bytes export_blocks(const KVCache& cache, I32Vector ids) {
  check_blocks(cache, ids);
  const auto bytes = static_cast<size_t>(cache.block_bytes());
  auto out = new_array<uint8_t>({ids.size(), bytes});
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(out.data() + i * bytes, cache.block(ids.data()[i]), bytes);
  }
  return out;
}

void import_blocks(KVCache& cache, I32Vector ids, Array<uint8_t, 2> data) {
  check_blocks(cache, ids);
  const auto bytes = static_cast<size_t>(cache.block_bytes());
  require(data.shape(0) == ids.size() && data.shape(1) == bytes,
          "data: block_nbytes for each id are needed");
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(cache.block(ids.data()[i]), data.data() + i * bytes, bytes);
  }
}

std::optional<NumpyArray<float>> run(nb::handle_t<Plan> self, nb::handle arrays,
                                     std::optional<Array<uint32_t, 1>> signal, uint32_t expected) {
  Plan& plan = nb::cast<Plan&>(self);
  const Batch batch = batch_from(arrays);
  require(!signal || signal->size() == 1, "signal: one value is needed");
  bool is_complete = false;
  {
    const ReleaseGil release;
    is_complete = plan.run(batch, {data_or_null(signal), expected});
  }
  if (!is_complete) return std::nullopt;
  const size_t shape[] = {static_cast<size_t>(batch.num_logits),
                          static_cast<size_t>(plan.logits_cols())};
  return NumpyArray<float>(const_cast<float*>(plan.logits()), 2, shape, self);
}

std::map<std::string, double> op_times(const Plan& plan) {
  static constexpr const char* kNames[] = {"embed",     "rms_norm", "linear",       "rope_and_cache",
                                           "attention", "silu_mul", "select_logits"};
  static_assert(std::size(kNames) == static_cast<size_t>(OpKind::kCount));
  std::map<std::string, double> times;
  for (size_t i = 0; i < std::size(kNames); ++i) times[kNames[i]] = plan.op_seconds()[i];
  return times;
}

PlanShape make_shape(int num_heads, float scale, F32Vector inv_freq, bool is_interleaved,
                     float rope_attention_factor) {
  return {.num_heads = num_heads,
          .attention_scale = scale,
          .inv_freq = {inv_freq.data(), inv_freq.data() + inv_freq.size()},
          .is_interleaved = is_interleaved,
          .rope_attention_factor = rope_attention_factor,
          .vocab_size = 0,
          .max_num_tokens = 0,
          .max_num_seqs = 0,
          .max_num_logits = 0};
}

void bind_cache(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<KVCache>(m, "KVCache")
      .def(
          "__init__",
          [](KVCache* self, int num_layers, int64_t num_blocks, int num_kv_heads, int head_dim,
             const std::string& format) {
            new (self) KVCache(
                {num_layers, num_blocks, num_kv_heads, head_dim, parse_kv_format(format)});
          },
          "num_layers"_a, "num_blocks"_a, "num_kv_heads"_a, "head_dim"_a, "format"_a)
      .def_prop_ro("num_blocks", [](const KVCache& c) { return c.shape().num_blocks; })
      .def_prop_ro("block_nbytes", &KVCache::block_bytes)
      .def("export_blocks", export_blocks, "block_ids"_a)
      .def("import_blocks", import_blocks, "block_ids"_a, "data"_a);
}

}  // namespace

void bind_plan(nb::module_& m) {
  using namespace nb::literals;
  bind_cache(m);
  nb::class_<RmsNorm>(m, "RmsNorm")
      .def(
          "__init__",
          [](RmsNorm* self, F32Vector weight, float eps) {
            new (self) RmsNorm{{weight.data(), weight.data() + weight.size()}, eps};
          },
          "weight"_a, "eps"_a);
  nb::class_<PlanShape>(m, "PlanShape")
      .def(
          "__init__",
          [](PlanShape* self, int num_heads, float attention_scale, F32Vector inv_freq,
             bool is_interleaved, float rope_attention_factor) {
            new (self) PlanShape(make_shape(num_heads, attention_scale, inv_freq, is_interleaved,
                                            rope_attention_factor));
          },
          "num_heads"_a, "attention_scale"_a, "inv_freq"_a, "is_interleaved"_a,
          "rope_attention_factor"_a)
      .def_rw("vocab_size", &PlanShape::vocab_size)
      .def_rw("max_num_tokens", &PlanShape::max_num_tokens)
      .def_rw("max_num_seqs", &PlanShape::max_num_seqs)
      .def_rw("max_num_logits", &PlanShape::max_num_logits);
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<std::shared_ptr<Runtime>, std::shared_ptr<KVCache>, PlanShape, int64_t>(),
           "runtime"_a, "kv_cache"_a, "shape"_a, "arena_nbytes"_a)
      .def(
          "add_buffer",
          [](Plan& plan, int64_t offset, int64_t features, bool is_logits) {
            return plan.add_buffer({offset, features, is_logits});
          },
          "offset"_a, "features"_a, "is_logits"_a)
      .def("add_embed", &Plan::add_embed, "table"_a, "out"_a, nb::keep_alive<1, 2>())
      .def("add_rms_norm", &Plan::add_rms_norm, "x"_a, "norm"_a, "out"_a, nb::keep_alive<1, 3>())
      .def("add_linear", &Plan::add_linear, "x"_a, "weight"_a, "out"_a, "norm"_a.none(),
           "is_gated"_a, "residual"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
      .def("add_rope_and_cache", &Plan::add_rope_and_cache, "qkv"_a, "layer"_a, "q_norm"_a.none(),
           "k_norm"_a.none(), "out"_a, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("add_attention", &Plan::add_attention, "q"_a, "layer"_a, "out"_a)
      .def("add_silu_mul", &Plan::add_silu_mul, "gate_up"_a, "out"_a)
      .def("add_select", &Plan::add_select, "x"_a, "out"_a)
      .def("finish", &Plan::finish, "logits"_a)
      .def("run", run, "batch"_a, "signal"_a.none().noconvert() = nb::none(),
           "expected"_a = 0)
      .def("op_times", op_times);
}

}  // namespace caudal
