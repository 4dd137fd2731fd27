// Chooses the instruction set's kernels at run time.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace caudal {

// Capability scores: 0 if this CPU or its operating system cannot run the kernels, else the higher
// the better. Built without ISA flags, so that asking is always safe.
int score_ref();
int score_avx2();
int score_avxvnni();
int score_avx512vnni();
// Asks the system for the tile registers, which it grants to the process and its later threads.
int score_amx();

// All kernel sets in this build, and those that this machine can run, best first.
std::vector<const KernelTable*> all_tables();
std::vector<const KernelTable*> available_tables();

// The best kernel set, or the one named. Throws std::invalid_argument with a one-line reason if the
// name is unknown or this CPU cannot run it.
const KernelTable& select_table(const std::string& name);

}  // namespace caudal
