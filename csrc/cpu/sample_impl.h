// Sampling: one row of logits per task. Written over the sixteen lanes of a simd_*.h included
// before; every instruction set performs the same operations in the same order, so that a seed
// gives the same tokens everywhere.
//
// Order of the steps: repetition, frequency and presence penalties, bias, mask, temperature, min-p,
// top-k, top-p. Each filter keeps the most likely tokens, the lower id first among equals; so one
// cut describes what is kept and nothing is ever sorted. Anonymous namespace: see numerics.h.
#pragma once

#include "kernels.h"
#include "numerics.h"

namespace caudal {
namespace {

constexpr int kBlockIds = 512;               // ids whose weights are summed together
constexpr float kGreedyTemperature = 1e-5f;  // at or below it, division would overflow
constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -3.4028235e38f;  // keeps every token but those at -inf

inline int num_id_blocks(int vocab) { return (vocab + kBlockIds - 1) / kBlockIds; }

// Calls f(i, x[i .. i + 15]) for i = begin, begin + 16, …; lanes from `end` on are -inf.
template <class F>
inline void for_each_vector(const float* x, int begin, int end, const F& f) {
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, F32::load(x + i));
  if (i < end) f(i, F32::load_first(x + i, end - i, -kInfinity));
}

// Uniform in [0, 1), a function of its arguments alone (finaliser of SplitMix64, Steele et al.
// 2014).
inline uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

inline double uniform(uint64_t seed, int64_t position) {
  constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
  const uint64_t stream = mix_bits(seed + kGamma);
  const uint64_t z = mix_bits(stream + (static_cast<uint64_t>(position) + 1) * kGamma);
  return static_cast<double>(z >> 11) * 0x1p-53;
}

// A thread's scratch memory; `list` and `copy` hold the vocabulary and one vector more.
struct SampleMemory {
  static size_t num_bytes(int vocab) {
    const size_t blocks = static_cast<size_t>(num_id_blocks(vocab));
    return 64 + blocks * (sizeof(double) + kLanes * sizeof(float)) +
           2 * (blocks + 1) * kBlockIds * sizeof(float);
  }

  float* maxima;       // [blocks][16] largest logit per lane of a block of ids
  double* block_sums;  // [blocks]
  float* list;
  float* copy;

  SampleMemory(std::byte* scratch, int vocab) {
    const int64_t blocks = num_id_blocks(vocab);
    const int64_t padded = (blocks + 1) * kBlockIds;
    block_sums = reinterpret_cast<double*>(scratch);
    maxima = reinterpret_cast<float*>(block_sums + (blocks + 7) / 8 * 8);
    list = maxima + blocks * kLanes;
    copy = list + padded;
  }
};

// Tokens that are kept: logits above `cut`, and those equal to it with an id below `tie_end`.
struct Filter {
  float cut;
  int tie_end;

  // x [i .. i + 15] -> w where kept, else 0.
  F32 apply(F32 x, F32 w, int i) const {
    const F32 c = F32::set1(cut);
    if (i + kLanes <= tie_end) return F32::zero_if_less(x, c, w);
    const F32 above = F32::zero_unless_less(c, x, w);
    return i >= tie_end ? above : F32::keep_first(F32::zero_if_less(x, c, w), tie_end - i, above);
  }
  uint32_t mask(F32 x, int i) const {
    const F32 c = F32::set1(cut);
    const uint32_t above = F32::less_mask(c, x);
    if (i >= tie_end) return above;
    const uint32_t equal = F32::equal_mask(c, x);
    return above | (i + kLanes <= tie_end ? equal : equal & ((1u << (tie_end - i)) - 1));
  }
};

// Weight of a token: exp((x - max) / temperature), at most 1.
struct Softmax {
  float max;
  float steps;  // powers of two per unit of logit

  static Softmax at(float max, float temperature) {
    constexpr float kLog2E = 1.44269504f;
    return {max, kLog2E / temperature};
  }
  F32 operator()(F32 x) const { return exp2_approx((x - F32::set1(max)) * F32::set1(steps)); }
};

struct CountOne {
  F32 operator()(F32) const { return F32::set1(1.0f); }
};

// Position of a cut in a list: `value` and how many equal to it, from the lowest id, are kept.
struct Cut {
  float value;
  int64_t num_ties;
};

// A range of values in which a cut probably lies.
struct Bracket {
  float low;
  float high;
};

// The bracket of the place where the values of `list`, from the largest down, have `share` of the
// measure, guessed from a sample. A single value (low == high) if the list is short.
template <class Measure>
Bracket guess_bracket(const float* list, int n, double share, const Measure& measure) {
  constexpr int kSample = 2 * kLanes;
  constexpr int kMargin = 3;
  constexpr int kShort = 8 * kSample;
  float s[kSample];  // descending
  for (int i = 0; i < kSample; ++i) {
    const float x = list[static_cast<int64_t>(i) * n / kSample];
    int j = i;
    for (; j > 0 && s[j - 1] < x; --j) s[j] = s[j - 1];
    s[j] = x;
  }
  float each[kSample];
  measure(F32::load(s)).store(each);
  measure(F32::load(s + kLanes)).store(each + kLanes);
  double all = 0.0;
  for (int i = 0; i < kSample; ++i) all += each[i];
  int place = 0;
  double sum = each[0];
  while (place < kSample - 1 && sum < share * all) sum += each[++place];
  if (n < kShort) return {s[place], s[place]};
  const int high = place > kMargin ? place - kMargin : 0;
  const int low = place + kMargin < kSample ? place + kMargin : kSample - 1;
  return {s[low], s[high]};
}

struct BracketSums {
  double above;
  double inside;
  int64_t num_inside;
};

template <class Measure>
BracketSums measure_bracket(const float* list, int n, Bracket bracket, const Measure& measure) {
  const F32 low = F32::set1(bracket.low);
  const F32 high = F32::set1(bracket.high);
  F64Sum above, above_low;
  int64_t num_below = 0, num_above = 0;
  for_each_vector(list, 0, n, [&](int, F32 x) {
    const F32 m = measure(x);
    above.add(F32::zero_unless_less(high, x, m));
    above_low.add(F32::zero_if_less(x, low, m));
    num_above += __builtin_popcount(F32::less_mask(high, x));
    num_below += __builtin_popcount(F32::less_mask(x, low));
  });
  // Lanes past the end are -inf and count as below.
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  const double total_above = above.total();
  return {total_above, above_low.total() - total_above, padded - num_above - num_below};
}

// The smallest set of largest values of `list` whose measures add up to `limit`; everything if
// there is none. `all` is the measure of the whole list. Quickselect with three-way partition;
// destroys the list.
template <class Measure>
Cut select_cut(float* list, int n, double limit, double all, const Measure& measure) {
  Cut fallback{kLowest, INT64_MAX};
  double sum = 0.0;  // of the values above all that are left in the list
  bool is_stuck = false;
  while (n > 0) {
    Bracket bracket = guess_bracket(list, n, (limit - sum) / all, measure);
    if (is_stuck) bracket.low = bracket.high;
    const BracketSums sums = measure_bracket(list, n, bracket, measure);
    const bool is_above = sum + sums.above >= limit;
    const bool is_inside = !is_above && sum + sums.above + sums.inside >= limit;
    if (is_above) {
      fallback = {bracket.high, 0};
      all = sums.above;
    } else if (is_inside && bracket.low == bracket.high) {
      const double each = sums.inside / static_cast<double>(sums.num_inside);
      int64_t ties = 1;
      sum += sums.above;
      while (ties < sums.num_inside && sum + static_cast<double>(ties) * each < limit) ++ties;
      return {bracket.low, ties};
    } else if (is_inside) {
      fallback = {bracket.low, INT64_MAX};
      sum += sums.above;
      all = sums.inside;
    } else {
      sum += sums.above + sums.inside;
      all -= sums.above + sums.inside;
    }
    const F32 low = F32::set1(bracket.low);
    const F32 high = F32::set1(bracket.high);
    int kept = 0;
    for_each_vector(list, 0, n, [&](int i, F32 x) {
      const uint32_t below = F32::less_mask(x, low);
      const uint32_t above = F32::less_mask(high, x);
      uint32_t mask = is_above ? above : is_inside ? ~(below | above) & 0xffffu : below;
      if (n - i < kLanes) mask &= (1u << (n - i)) - 1;
      kept += x.compress(list + kept, mask);
    });
    is_stuck = kept == n;
    n = kept;
  }
  return fallback;
}

// One row of logits with the maxima of its blocks.
class Row {
 public:
  Row(const float* logits, int vocab, const SampleMemory& memory)
      : x_(logits), vocab_(vocab), memory_(memory) {
    F32 largest = F32::set1(-kInfinity);
    F32 magnitude = F32::zero();
    for (int b = 0; b < num_id_blocks(vocab); ++b) {
      F32 m = F32::set1(-kInfinity);
      for_each_vector(x_, b * kBlockIds, block_end(b), [&](int, F32 x) {
        m = F32::max(m, x);
        magnitude = F32::max_bits(magnitude, F32::abs(x));
      });
      m.store(memory_.maxima + b * kLanes);
      largest = F32::max(largest, m);
    }
    max_ = largest.max_lane();
    const uint32_t bits = __builtin_bit_cast(uint32_t, magnitude.max_lane_bits());
    has_nan_ = bits > 0x7f800000u;
  }

  float max() const { return max_; }

  // Not NaN anywhere, and some token is possible.
  bool is_valid() const { return !has_nan_ && max_ > -kInfinity && max_ < kInfinity; }

  // Id of the `n`-th logit (from 1) equal to `value`.
  int find_equal(float value, int64_t n) const {
    const F32 v = F32::set1(value);
    for (int b = 0; b < num_id_blocks(vocab_); ++b) {
      if (!reaches(b, value)) continue;
      int found = -1;
      for_each_vector(x_, b * kBlockIds, block_end(b), [&](int i, F32 x) {
        uint32_t mask = F32::equal_mask(x, v);
        for (; mask != 0; mask &= mask - 1) {
          if (--n == 0) found = i + __builtin_ctz(mask);
        }
      });
      if (found >= 0) return found;
    }
    return vocab_;
  }

  // 1 for the largest; equals rank by id.
  int rank(int id) const {
    const F32 v = F32::set1(x_[id]);
    int rank = 1;
    for_each_vector(x_, 0, vocab_, [&](int i, F32 x) {
      rank += __builtin_popcount(F32::less_mask(v, x));
      if (i > id) return;
      const uint32_t lower = id - i >= kLanes ? 0xffffu : (1u << (id - i)) - 1;
      rank += __builtin_popcount(F32::equal_mask(v, x) & lower);
    });
    return rank;
  }

  // Sum of the weights of kept tokens; fills block_sums.
  double total_weight(const Softmax& softmax, const Filter& filter) const {
    double total = 0.0;
    for (int b = 0; b < num_id_blocks(vocab_); ++b) {
      double sum = 0.0;
      if (reaches(b, filter.cut)) {
        sum = block_weight(b, softmax, filter);
      }
      memory_.block_sums[b] = sum;
      total += sum;
    }
    return total;
  }

  // The kept token where the running sum of weights, in order of id, passes `target`; after
  // total_weight with the same arguments.
  int draw(const Softmax& softmax, const Filter& filter, double target) const {
    int block = -1;
    double sum = 0.0;
    for (int b = 0; b < num_id_blocks(vocab_); ++b) {
      if (memory_.block_sums[b] == 0.0) continue;
      if (block >= 0) sum += memory_.block_sums[block];
      block = b;
      if (sum + memory_.block_sums[b] > target) break;
    }
    if (block < 0) return -1;
    int token = -1;
    bool is_found = false;
    for_each_vector(x_, block * kBlockIds, block_end(block), [&](int i, F32 x) {
      if (is_found) return;
      float w[kLanes];
      filter.apply(x, softmax(x), i).store(w);
      for (int j = 0; j < kLanes && !is_found; ++j) {
        if (w[j] == 0.0f) continue;
        sum += static_cast<double>(w[j]);
        token = i + j;
        is_found = sum > target;
      }
    });
    return token;  // the last possible one if rounding left the target just above the sum
  }

  // The `k` largest of the kept tokens.
  Filter top_k(const Filter& filter, int64_t k) const {
    const Filter bounded = raise(filter, kth_maximum(k));
    const int n = gather(x_, vocab_, bounded, true);
    if (n <= k) return bounded;
    return tighten(filter, select_cut(memory_.list, n, static_cast<double>(k), n, CountOne{}));
  }

  // The most likely kept tokens that reach the share `p` of the kept weight.
  Filter top_p(const Filter& filter, const Softmax& softmax, double p) const {
    constexpr int kLikely = 512;
    const double total = total_weight(softmax, filter);
    // Usually a few of the most likely tokens are enough.
    int n = gather(x_, vocab_, raise(filter, kth_maximum(kLikely)), true);
    const double likely = sum_list(n, softmax);
    if (likely >= p * total) {
      return tighten(filter, select_cut(memory_.list, n, p * total, likely, softmax));
    }
    // Logits below this bound hold less than 1 - p of the weight all together.
    const double share = (1.0 - p) * total / vocab_;
    double bound = static_cast<double>(kLowest);
    if (share > 0.0) {
      const double steps = __builtin_log2(share) - 0.01;
      const double x = max_ + steps / static_cast<double>(softmax.steps);
      bound = x > bound ? x : bound;
    }
    n = gather(x_, vocab_, raise(filter, static_cast<float>(bound)), true);
    return tighten(filter, select_cut(memory_.list, n, p * total, total, softmax));
  }

  // Logarithm of a token's probability, given that of the sum of all weights.
  float logprob(int id, double log_sum) const {
    return static_cast<float>((static_cast<double>(x_[id]) - max_) - log_sum);
  }

  // Ids of the `k` largest logits, largest first, and their logprobs.
  void list_top(int64_t k, double log_sum, int32_t* ids, float* values) const {
    const Filter filter = top_k({kLowest, vocab_}, k);
    int count = 0;
    for (int b = 0; b < num_id_blocks(vocab_); ++b) {
      if (!reaches(b, filter.cut)) continue;
      for_each_vector(x_, b * kBlockIds, block_end(b), [&](int i, F32 x) {
        uint32_t mask = filter.mask(x, i);
        for (; mask != 0 && count < k; mask &= mask - 1)
          insert(ids, count++, i + __builtin_ctz(mask));
      });
    }
    for (int i = 0; i < count; ++i) values[i] = logprob(ids[i], log_sum);
  }

 private:
  int block_end(int block) const {
    return (block + 1) * kBlockIds < vocab_ ? (block + 1) * kBlockIds : vocab_;
  }

  bool reaches(int block, float value) const {
    const F32 m = F32::load(memory_.maxima + block * kLanes);
    return F32::less_mask(m, F32::set1(value)) != 0xffffu;
  }

  // A value that at least `k` logits reach, as near to the k-th largest as the maxima tell.
  float kth_maximum(int64_t k) const {
    const int num_maxima = num_id_blocks(vocab_) * kLanes;
    if (k > num_maxima) return kLowest;
    const int n = gather(memory_.maxima, num_maxima, {kLowest, num_maxima}, false);
    return select_cut(memory_.list, n, static_cast<double>(k), n, CountOne{}).value;
  }

  // The filter, without the logits below `bound`.
  Filter raise(const Filter& filter, float bound) const {
    return bound > filter.cut ? Filter{bound, vocab_} : filter;
  }

  // Whole groups of four vectors are summed in single precision before they enter the sums in
  // double precision.
  double block_weight(int block, const Softmax& softmax, const Filter& filter) const {
    F64Sum sum;
    const auto weight = [&](int i) __attribute__((always_inline)) {
      const F32 x = F32::load(x_ + i);
      return filter.apply(x, softmax(x), i);
    };
    int i = block * kBlockIds;
    for (; i + 4 * kLanes <= block_end(block); i += 4 * kLanes) {
      const F32 first = weight(i) + weight(i + kLanes);
      sum.add(first + (weight(i + 2 * kLanes) + weight(i + 3 * kLanes)));
    }
    for_each_vector(x_, i, block_end(block),
                    [&](int at, F32 x) { sum.add(filter.apply(x, softmax(x), at)); });
    return sum.total();
  }

  double sum_list(int n, const Softmax& softmax) const {
    F64Sum sum;
    for_each_vector(memory_.list, 0, n, [&](int, F32 x) { sum.add(softmax(x)); });
    return sum.total();
  }

  // Copies what the filter keeps of x [n] into the list; returns the number.
  int gather(const float* x, int n, const Filter& filter, bool has_maxima) const {
    int count = 0;
    for (int begin = 0; begin < n; begin += kBlockIds) {
      if (has_maxima && !reaches(begin / kBlockIds, filter.cut)) continue;
      const int end = begin + kBlockIds < n ? begin + kBlockIds : n;
      for_each_vector(x, begin, end, [&](int i, F32 v) {
        count += v.compress(memory_.list + count, filter.mask(v, i));
      });
    }
    return count;
  }

  // The filter with a cut that select_cut found among what it keeps.
  Filter tighten(const Filter& filter, const Cut& cut) const {
    if (cut.value < filter.cut) return filter;
    if (cut.num_ties == 0) return {cut.value, 0};
    const int last = find_equal(cut.value, cut.num_ties);
    return {cut.value, last < vocab_ ? last + 1 : vocab_};
  }

  // Insertion by logit; ids come in ascending order, so equals stay in it.
  void insert(int32_t* ids, int count, int id) const {
    int i = count;
    for (; i > 0 && x_[ids[i - 1]] < x_[id]; --i) ids[i] = ids[i - 1];
    ids[i] = id;
  }

  const float* x_;
  const int vocab_;
  const SampleMemory& memory_;
  float max_;
  bool has_nan_;
};

inline bool has_adjustments(const SampleArgs& args, int row) {
  return args.bias_indptr[row] != args.bias_indptr[row + 1] ||
         args.history_indptr[row] != args.history_indptr[row + 1];
}

inline void adjust_logits(const SampleArgs& args, int row, float* x) {
  const float repetition = args.repetition_penalty[row];
  for (int i = args.history_indptr[row]; i < args.history_indptr[row + 1]; ++i) {
    const int id = args.history_ids[i];
    const int count = args.history_counts[i];
    float v = x[id];
    v = v > 0.0f ? v / repetition : v * repetition;
    v -= args.frequency_penalty[row] * static_cast<float>(count);
    if (count > 0) v -= args.presence_penalty[row];
    x[id] = v;
  }
  for (int i = args.bias_indptr[row]; i < args.bias_indptr[row + 1]; ++i) {
    x[args.bias_ids[i]] += args.bias_values[i];
  }
}

inline bool is_greedy(const SampleArgs& args, int row) {
  return !(args.temperature[row] > kGreedyTemperature) || args.top_k[row] == 1 ||
         args.top_p[row] <= 0.0f;
}

// A token from adjusted logits, or -1.
inline int choose_token(const SampleArgs& args, int row, const Row& logits) {
  const float temperature = args.temperature[row];
  const float p = args.top_p[row];
  const int k = args.top_k[row];
  if (!logits.is_valid()) return -1;
  if (is_greedy(args, row)) {
    return logits.find_equal(logits.max(), 1);
  }
  const Softmax softmax = Softmax::at(logits.max(), temperature);
  Filter filter{kLowest, args.vocab};
  const float min_p = args.min_p[row];
  if (min_p > 0.0f) {
    const double below = temperature * __builtin_log(static_cast<double>(min_p));
    const auto cut = static_cast<float>(logits.max() + below);
    filter.cut = cut < logits.max() ? cut : logits.max();
  }
  if (k > 0 && k < args.vocab) filter = logits.top_k(filter, k);
  if (p < 1.0f) filter = logits.top_p(filter, softmax, p);
  const double total = logits.total_weight(softmax, filter);
  return logits.draw(softmax, filter, uniform(args.seed[row], args.position[row]) * total);
}

// The words of a row's mask, or null.
inline const uint32_t* mask_of(const SampleArgs& args, int row) {
  const int64_t index = args.mask_rows[row];
  return index < 0 ? nullptr : args.mask_words + index * ((args.vocab + 31) / 32);
}

// Makes the ids whose bit is not set impossible.
inline void forbid(const uint32_t* mask, int vocab, float* x) {
  const F32 never = F32::set1(-kInfinity);
  int i = 0;
  for (; i + 2 * kLanes <= vocab; i += 2 * kLanes) {
    const uint32_t word = mask[i / 32];
    if (word == ~0u) continue;
    F32::select(word & 0xffff, F32::load(x + i), never).store(x + i);
    F32::select(word >> 16, F32::load(x + i + kLanes), never).store(x + i + kLanes);
  }
  for (; i < vocab; ++i) {
    if ((mask[i / 32] >> (i % 32) & 1) == 0) x[i] = -kInfinity;
  }
}

// The id of the largest of x among those whose bit is set, the lowest id among equals; -1 if all
// are impossible.
inline int best_allowed(const uint32_t* mask, int vocab, const float* x) {
  const auto for_each_allowed = [&](const auto& f) __attribute__((always_inline)) {
    for (int i = 0; i < vocab; i += kLanes) {
      const uint32_t bits = mask[i / 32] >> (i % 32) & 0xffff;
      if (bits == 0) continue;
      const F32 v = i + kLanes <= vocab ? F32::load(x + i)
                                        : F32::load_first(x + i, vocab - i, -kInfinity);
      if (f(i, bits, v)) return;
    }
  };
  F32 largest = F32::set1(-kInfinity);
  for_each_allowed([&](int, uint32_t bits, F32 v) {
    largest = F32::max(largest, F32::select(bits, v, F32::set1(-kInfinity)));
    return false;
  });
  const float max = largest.max_lane();
  int best = -1;
  if (max == -kInfinity) return best;
  for_each_allowed([&](int i, uint32_t bits, F32 v) {
    const uint32_t equal = F32::equal_mask(v, F32::set1(max)) & bits;
    if (equal != 0) best = i + __builtin_ctz(equal);
    return equal != 0;
  });
  return best;
}

// A token for a row whose logits x are valid, or -1. May overwrite x unless `keeps_logits`.
inline int sample_token(const SampleArgs& args, int row, const Row& original, float* x,
                        bool keeps_logits, const SampleMemory& memory) {
  const bool is_adjusted = has_adjustments(args, row);
  const uint32_t* mask = mask_of(args, row);
  if (!is_adjusted && mask == nullptr) return choose_token(args, row, original);
  if (!is_adjusted && is_greedy(args, row)) return best_allowed(mask, args.vocab, x);
  float* changed = x;
  if (keeps_logits) {
    changed = memory.copy;
    __builtin_memcpy(changed, x, static_cast<size_t>(args.vocab) * sizeof(float));
  }
  if (is_adjusted) adjust_logits(args, row, changed);
  if (mask != nullptr) forbid(mask, args.vocab, changed);
  return choose_token(args, row, Row(changed, args.vocab, memory));
}

inline void sample_row(const SampleArgs& args, int row, Worker& worker) {
  const int vocab = args.vocab;
  const int target = args.target_ids[row];
  const int num_top = args.num_logprobs[row];
  const bool wants_logprobs = num_top >= 0 || target >= 0;
  float* x = args.logits + args.logit_rows[row] * args.logits_stride;
  int32_t* top_ids = args.top_ids + int64_t{row} * args.max_logprobs;
  float* top_logprobs = args.top_logprobs + int64_t{row} * args.max_logprobs;
  for (int i = 0; i < args.max_logprobs; ++i) {
    top_ids[i] = -1;
    top_logprobs[i] = __builtin_nanf("");
  }
  args.token_ids[row] = -1;
  args.logprobs[row] = __builtin_nanf("");
  args.ranks[row] = 0;
  if (SampleMemory::num_bytes(vocab) > worker.scratch_bytes) return;  // half a million ids fit
  const SampleMemory memory(worker.scratch, vocab);
  const Row original(x, vocab, memory);
  if (!original.is_valid()) return;
  double log_sum = 0.0;
  if (wants_logprobs) {
    const Softmax softmax = Softmax::at(original.max(), 1.0f);
    log_sum = __builtin_log(original.total_weight(softmax, {kLowest, vocab}));
    if (num_top > 0) original.list_top(num_top, log_sum, top_ids, top_logprobs);
  }
  const int token =
      target >= 0 ? target : sample_token(args, row, original, x, wants_logprobs, memory);
  args.token_ids[row] = token;
  if (!wants_logprobs || token < 0) return;
  args.logprobs[row] = original.logprob(token, log_sum);
  args.ranks[row] = original.rank(token);
}

inline void run_best_allowed(const BestAllowedArgs& args, Worker& worker) {
  for (int64_t row = next_task(worker); row < args.num_rows; row = next_task(worker)) {
    const uint32_t* mask = args.mask_words + row * ((args.vocab + 31) / 32);
    const float* x = args.logits + args.logit_rows[row] * args.logits_stride;
    args.token_ids[row] = best_allowed(mask, args.vocab, x);
  }
}

inline void run_sample(const SampleArgs& args, Worker& worker) {
  for (int64_t row = next_task(worker); row < args.num_rows; row = next_task(worker)) {
    sample_row(args, static_cast<int>(row), worker);
  }
}

}  // namespace
}  // namespace caudal
