// What one backend owns: its kernels, its number of threads and the memory of its weights.
#pragma once

#include <stdexcept>
#include <string>

#include "isa.h"
#include "memory.h"
#include "pack.h"
#include "thread_pool.h"

namespace caudal {

struct Runtime {
  // Throws std::invalid_argument for an unknown or unsupported instruction set ("" is the best
  // one) or a number of threads outside 1 … kMaxThreads.
  Runtime(const std::string& isa, int num_threads)
      : table(&select_table(isa)), num_threads(num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) {
      throw std::invalid_argument("num_threads must be 1 to " + std::to_string(kMaxThreads) +
                                  ", got " + std::to_string(num_threads));
    }
  }

  const KernelTable* table;
  int num_threads;
  Arena arena;
};

// Run one kernel on all threads.
template <class Args>
void run_kernel(void (*kernel)(const Args&, Worker&), const Args& args, int num_threads) {
  struct Call {
    void (*kernel)(const Args&, Worker&);
    const Args* args;
  } call{kernel, &args};
  run_parallel(
      num_threads,
      [](void* context, Worker& worker) {
        const Call& c = *static_cast<Call*>(context);
        c.kernel(*c.args, worker);
      },
      &call);
}

}  // namespace caudal
