// Attention of each tiled KV format.
#pragma once

#include "../kernels.h"

namespace caudal::amx {

void attention_int8(const AttentionArgs& args, Worker& worker);
void attention_bf16(const AttentionArgs& args, Worker& worker);

}  // namespace caudal::amx
