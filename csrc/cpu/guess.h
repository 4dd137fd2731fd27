// Guesses how a text goes on: as it went on after the same tokens earlier in it.
#pragma once

#include <cstdint>

namespace caudal {

// Writes up to `max_guesses` tokens that followed the longest earlier occurrence of the last tokens
// of a text (the latest of equally long ones) and returns their number: 0 if the last `min_match`
// tokens occur nowhere before, else `max_guesses`, because a guess that reaches the end of the text
// goes on with itself. Occurrences longer than `max_match` count as so long.
int guess_tokens(const int32_t* tokens, int length, int min_match, int max_match, int max_guesses,
                 int32_t* guesses);

}  // namespace caudal
