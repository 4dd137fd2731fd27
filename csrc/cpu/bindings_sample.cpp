// Checks the sampling arrays and calls the sampling kernel; guesses tokens.
#include <algorithm>
#include <vector>

#include "bindings.h"
#include "guess.h"

namespace caudal {
namespace {

void require_field(bool condition, const char* name, const char* what) {
  if (!condition) throw std::invalid_argument(std::string(name) + ": " + what);
}

template <class T>
const T* row_values(nb::handle params, const char* name, size_t num_rows) {
  const auto array = field<Array<T, 1>>(params, name);
  require_field(array.size() == num_rows, name, "one value per row is needed");
  return array.data();
}

// indptr [rows + 1] must start at 0 and not decrease; returns the number of entries.
const int32_t* row_starts(nb::handle params, const char* name, size_t num_rows) {
  const auto array = field<I32Vector>(params, name);
  require_field(array.size() == num_rows + 1, name, "rows + 1 values are needed");
  const int32_t* starts = array.data();
  require_field(starts[0] == 0, name, "must start at 0");
  for (size_t i = 0; i < num_rows; ++i) {
    require_field(starts[i] <= starts[i + 1], name, "must not decrease");
  }
  return starts;
}

const int32_t* token_ids(nb::handle params, const char* name, int32_t size, int64_t vocab) {
  const auto array = field<I32Vector>(params, name);
  require_field(array.size() == static_cast<size_t>(size), name, "differs in size from its indptr");
  for (size_t i = 0; i < array.size(); ++i) {
    require_field(array.data()[i] >= 0 && array.data()[i] < vocab, name, "outside the vocabulary");
  }
  return array.data();
}

template <class T>
const T* entries(nb::handle params, const char* name, int32_t size) {
  const auto array = field<Array<T, 1>>(params, name);
  require_field(array.size() == static_cast<size_t>(size), name, "differs in size from its indptr");
  return array.data();
}

void set_sparse_lists(nb::handle params, size_t rows, SampleArgs& args) {
  args.bias_indptr = row_starts(params, "bias_indptr", rows);
  args.bias_ids = token_ids(params, "bias_ids", args.bias_indptr[rows], args.vocab);
  args.bias_values = entries<float>(params, "bias_values", args.bias_indptr[rows]);
  args.history_indptr = row_starts(params, "history_indptr", rows);
  args.history_ids = token_ids(params, "history_ids", args.history_indptr[rows], args.vocab);
  args.history_counts = entries<int32_t>(params, "history_counts", args.history_indptr[rows]);
}

// Rows of words cover the vocabulary exactly; without masks their number does not matter.
void set_masks(nb::handle params, size_t rows, SampleArgs& args) {
  args.mask_rows = row_values<int32_t>(params, "mask_rows", rows);
  const auto words = field<Array<int32_t, 2>>(params, "mask_words");
  const auto num_words = static_cast<size_t>((args.vocab + 31) / 32);
  require_field(words.shape(0) == 0 || words.shape(1) == num_words, "mask_words",
                "a bit per id is needed");
  for (size_t i = 0; i < rows; ++i) {
    require_field(args.mask_rows[i] < static_cast<int64_t>(words.shape(0)), "mask_rows",
                  "no such row of mask_words");
  }
  args.mask_words = reinterpret_cast<const uint32_t*>(words.data());
}

const int32_t* checked_logit_rows(const I32Vector& logit_rows, size_t num_logits) {
  std::vector<bool> is_taken(num_logits);
  for (size_t i = 0; i < logit_rows.size(); ++i) {
    const auto row = static_cast<size_t>(logit_rows.data()[i]);
    require_field(row < num_logits && !is_taken[row], "logit_rows", "not a row, or one twice");
    is_taken[row] = true;
  }
  return logit_rows.data();
}

void set_row_values(nb::handle params, size_t rows, SampleArgs& args) {
  args.temperature = row_values<float>(params, "temperature", rows);
  args.top_k = row_values<int32_t>(params, "top_k", rows);
  args.top_p = row_values<float>(params, "top_p", rows);
  args.min_p = row_values<float>(params, "min_p", rows);
  args.presence_penalty = row_values<float>(params, "presence_penalty", rows);
  args.frequency_penalty = row_values<float>(params, "frequency_penalty", rows);
  args.repetition_penalty = row_values<float>(params, "repetition_penalty", rows);
  args.seed = row_values<uint64_t>(params, "seed", rows);
  args.position = row_values<int64_t>(params, "position", rows);
  args.num_logprobs = row_values<int32_t>(params, "num_logprobs", rows);
  args.target_ids = row_values<int32_t>(params, "target_ids", rows);
  args.max_logprobs = 0;
  for (size_t i = 0; i < rows; ++i) {
    require_field(args.target_ids[i] < args.vocab, "target_ids", "outside the vocabulary");
    require_field(args.num_logprobs[i] <= args.vocab, "num_logprobs", "above the vocabulary's size");
    args.max_logprobs = std::max(args.max_logprobs, args.num_logprobs[i]);
  }
}

// Guesses of rows [n, max_guesses]; -1 from where there is none.
NumpyArray<int32_t> guess_rows(Array<int32_t, 2> tokens, I32Vector rows, I32Vector lengths,
                               int min_match, int max_match, int max_guesses) {
  const size_t count = rows.size();
  require(lengths.size() == count, "lengths: one per row is needed");
  require(min_match >= 1 && max_match >= min_match, "min_match: from 1 to max_match");
  require(max_guesses >= 0, "max_guesses: not negative");
  auto guesses = new_array<int32_t>({count, static_cast<size_t>(max_guesses)});
  std::fill_n(guesses.data(), guesses.size(), -1);
  for (size_t i = 0; i < count; ++i) {
    const auto row = static_cast<size_t>(rows.data()[i]);
    const int length = lengths.data()[i];
    require(row < tokens.shape(0), "rows: no such row of tokens");
    require(length >= 0 && static_cast<size_t>(length) <= tokens.shape(1), "lengths: too long");
    guess_tokens(tokens.data() + row * tokens.shape(1), length, min_match, max_match, max_guesses,
                 guesses.data() + i * static_cast<size_t>(max_guesses));
  }
  return guesses;
}

}  // namespace

void bind_guesses(nb::module_& m) {
  m.def("guess_rows", guess_rows, nb::arg("tokens"), nb::arg("rows"), nb::arg("lengths"),
        nb::arg("min_match"), nb::arg("max_match"), nb::arg("max_guesses"));
}

SampleResult sample(const Runtime& runtime, MutableArray<float, 2> logits, nb::handle params) {
  const auto logit_rows = field<I32Vector>(params, "logit_rows");
  const size_t rows = logit_rows.size();
  require(logits.shape(1) > 0 && logits.shape(1) < (size_t{1} << 31), "logits: bad vocabulary size");
  SampleArgs args{};
  args.logits = logits.data();
  args.logits_stride = static_cast<int64_t>(logits.shape(1));
  args.num_rows = static_cast<int>(rows);
  args.vocab = static_cast<int>(logits.shape(1));
  args.logit_rows = checked_logit_rows(logit_rows, logits.shape(0));
  set_row_values(params, rows, args);
  set_sparse_lists(params, rows, args);
  set_masks(params, rows, args);
  const auto max_k = static_cast<size_t>(args.max_logprobs);
  auto ids = new_array<int32_t>({rows});
  auto logprobs = new_array<float>({rows});
  auto ranks = new_array<int32_t>({rows});
  auto top_ids = new_array<int32_t>({rows, max_k});
  auto top_logprobs = new_array<float>({rows, max_k});
  args.token_ids = ids.data();
  args.logprobs = logprobs.data();
  args.ranks = ranks.data();
  args.top_ids = top_ids.data();
  args.top_logprobs = top_logprobs.data();
  if (rows > 0) {
    const ReleaseGil release;
    run_kernel(runtime.table->sample, args, runtime.num_threads);
  }
  return {ids, logprobs, ranks, top_ids, top_logprobs};
}

NumpyArray<int32_t> best_allowed(const Runtime& runtime, Array<float, 2> logits,
                                 I32Vector logit_rows, Array<int32_t, 2> mask_words) {
  const size_t rows = logit_rows.size();
  BestAllowedArgs args{};
  args.logits = logits.data();
  args.logits_stride = static_cast<int64_t>(logits.shape(1));
  args.num_rows = static_cast<int>(rows);
  args.vocab = static_cast<int>(logits.shape(1));
  args.logit_rows = checked_logit_rows(logit_rows, logits.shape(0));
  require_field(mask_words.shape(0) == rows && mask_words.shape(1) == (logits.shape(1) + 31) / 32,
                "mask_words", "a bit per row and id is needed");
  args.mask_words = reinterpret_cast<const uint32_t*>(mask_words.data());
  auto ids = new_array<int32_t>({rows});
  args.token_ids = ids.data();
  // A few microseconds a row where little is allowed: less than it takes to wake another thread.
  run_kernel(runtime.table->best_allowed, args, 1);
  return ids;
}

}  // namespace caudal
