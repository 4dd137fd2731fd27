#include "guess.h"

#include <algorithm>

namespace caudal {

int guess_tokens(const int32_t* tokens, int length, int min_match, int max_match, int max_guesses,
                 int32_t* guesses) {
  int best_match = min_match - 1;
  int best_end = 0;
  for (int end = length - 1; end > best_match && best_match < max_match; --end) {
    const int most = std::min(end, max_match);
    int match = 0;
    while (match < most && tokens[end - 1 - match] == tokens[length - 1 - match]) ++match;
    if (match > best_match) {
      best_match = match;
      best_end = end;
    }
  }
  if (best_end == 0) return 0;
  for (int i = 0; i < max_guesses; ++i) {
    guesses[i] = best_end + i < length ? tokens[best_end + i] : guesses[best_end + i - length];
  }
  return max_guesses;
}

}  // namespace caudal
