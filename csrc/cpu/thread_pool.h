// The process's one pool of compute threads.
//
// Ownership: the pool lives as long as the process and is created on first use. The calling thread
// is worker 0; workers 1 … n - 1 are pool threads. Calls from several Python threads take turns, so
// that the machine is never oversubscribed. Between calls a worker spins briefly, then parks.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace caudal {

constexpr int kMaxThreads = 256;
constexpr size_t kScratchBytes = size_t{4} << 20;  // per thread; only touched pages cost memory

using Job = void (*)(void* context, Worker&);

// Run `job` on `num_threads` workers at once and wait for all of them. The job must not throw: a
// worker that leaves early would strand the others at a barrier. Denormals are flushed to zero
// inside. Throws std::system_error if a thread cannot be created; no job has started then.
// After fork() the child gets fresh threads.
void run_parallel(int num_threads, Job job, void* context);

// Join all pool threads; a later run_parallel starts them again.
void stop_threads();

// Threads that exist now, without the caller (for tests).
int num_pool_threads();

}  // namespace caudal
