#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace caudal {
namespace {

using Clock = std::chrono::steady_clock;

// Idle workers spin this long for the next step before they park.
constexpr auto kIdleSpin = std::chrono::microseconds(50);
// At a barrier the peer is normally a fraction of a task behind. A longer wait means that it lost
// its core: then parking lets the kernel move it to ours, which spinning would prevent.
constexpr auto kBarrierSpin = std::chrono::microseconds(100);
constexpr int kPausesPerClockRead = 16;

#if defined(__x86_64__)
void cpu_pause() { _mm_pause(); }

// Flush-to-zero and denormals-are-zero, for the lifetime of the object.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};
#else
void cpu_pause() { std::this_thread::yield(); }
struct FlushDenormals {
  FlushDenormals() {}
};
#endif

// Spin until `word` differs from `old`, then park on it. `parked` tells the notifier whether a
// system call is needed.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<int>& parked,
                     Clock::duration spin) {
  const auto deadline = Clock::now() + spin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      cpu_pause();
    }
  } while (Clock::now() < deadline);
  parked.fetch_add(1);
  word.wait(old);
  parked.fetch_sub(1);
}

// The store must be ordered before the load of `parked`, hence seq_cst for both.
void publish(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& parked) {
  word.store(value);
  if (parked.load() != 0) word.notify_all();
}

}  // namespace

class Team {
 public:
  void start(int count) {
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < count; ++i) {
      for (auto& claimed : shares_[i].claimed) claimed.store(0, std::memory_order_relaxed);
    }
  }

  void barrier(int index) {
    if (count_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      shares_[0].claimed[phase()].store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    // Nobody claims from the other phase's counter before all have arrived.
    shares_[index].claimed[1 - phase()].store(0, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      publish(generation_, generation + 1, parked_);
    } else {
      wait_for_change(generation_, generation, parked_, kBarrierSpin);
    }
  }

  int64_t next_task() {
    if (count_ == 1) {
      const int64_t task = next_.load(std::memory_order_relaxed);
      next_.store(task + 1, std::memory_order_relaxed);
      return task;
    }
    return next_.fetch_add(1, std::memory_order_relaxed);
  }

  int64_t claim_task(int index, int64_t num_tasks) {
    for (int k = 0; k < count_; ++k) {
      const int owner = index + k < count_ ? index + k : index + k - count_;
      const int64_t begin = num_tasks * owner / count_;
      const int64_t end = num_tasks * (owner + 1) / count_;
      // Low half: claims by the owner, from the front; high half: by others, from the back.
      std::atomic<int64_t>& claimed = shares_[owner].claimed[phase()];
      if (k > 0 && taken(claimed.load(std::memory_order_relaxed)) >= end - begin) continue;
      const int64_t before = claimed.fetch_add(k > 0 ? kBack : 1, std::memory_order_relaxed);
      if (taken(before) >= end - begin) continue;
      return k > 0 ? end - 1 - (before >> 32) : begin + (before & (kBack - 1));
    }
    return -1;
  }

 private:
  static constexpr int64_t kBack = int64_t{1} << 32;
  static int64_t taken(int64_t claimed) { return (claimed >> 32) + (claimed & (kBack - 1)); }

  // Alternates from barrier to barrier.
  int phase() const { return static_cast<int>(generation_.load(std::memory_order_relaxed) & 1); }

  struct alignas(64) Share {
    std::atomic<int64_t> claimed[2];
  };

  int count_ = 1;
  Share shares_[kMaxThreads] = {};
  // Both counters in one cache line: whoever arrives has it at hand for the next op's first task.
  alignas(64) std::atomic<int64_t> next_{0};
  std::atomic<int> arrived_{0};
  // What the others spin on is a line of its own.
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> parked_{0};
};

void barrier(Worker& worker) { worker.team->barrier(worker.index); }
int64_t next_task(Worker& worker) { return worker.team->next_task(); }
int64_t claim_task(Worker& worker, int64_t count) {
  return worker.team->claim_task(worker.index, count);
}

namespace {

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};

class Pool {
 public:
  void run(int num_threads, Job job, void* context) {
    const std::lock_guard lock(mutex_);
    ensure_threads(num_threads);
    job_ = job;
    context_ = context;
    team_.start(num_threads);
    if (num_threads > 1) announce(num_threads);
    const FlushDenormals flush;
    work(0, num_threads);
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    if (threads_.empty()) return;
    announce(kStop);
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  int num_threads() {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(threads_.size());
  }

 private:
  // The low bits of the word say how many workers take part; packed with a sequence number into
  // one atomic, so that a worker that is late for a job it has no part in cannot misread the next.
  static constexpr uint32_t kCountBits = 9;
  static constexpr uint32_t kCountMask = (1u << kCountBits) - 1;
  static constexpr uint32_t kStop = kCountMask;

  void announce(uint32_t count) {
    const uint32_t word = job_word_.load(std::memory_order_relaxed);
    publish(job_word_, ((word | kCountMask) + 1) | count, parked_);
  }

  void work(int index, int count) {
    Worker worker{index, count, &team_, scratch_[static_cast<size_t>(index)].get(), kScratchBytes};
    job_(context_, worker);
    team_.barrier(index);
  }

  void worker_loop(int index, uint32_t word) {
    const FlushDenormals flush;
    for (;;) {
      wait_for_change(job_word_, word, parked_, kIdleSpin);
      word = job_word_.load(std::memory_order_acquire);
      const uint32_t count = word & kCountMask;
      if (count == kStop) return;
      if (static_cast<uint32_t>(index) < count) work(index, static_cast<int>(count));
    }
  }

  void ensure_threads(int num_threads) {
    while (scratch_.size() < static_cast<size_t>(num_threads)) {
      auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, kScratchBytes));
      if (memory == nullptr) throw std::bad_alloc();
      scratch_.emplace_back(memory);
    }
    if (threads_.size() + 1 >= static_cast<size_t>(num_threads)) return;
    // Signals are for the interpreter's own threads.
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    try {
      while (threads_.size() + 1 < static_cast<size_t>(num_threads)) {
        const int index = static_cast<int>(threads_.size()) + 1;
        const uint32_t word = job_word_.load(std::memory_order_relaxed);
        threads_.emplace_back([this, index, word] { worker_loop(index, word); });
      }
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &saved, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &saved, nullptr);
  }

  std::mutex mutex_;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<std::byte, FreeDeleter>> scratch_;
  Team team_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_word_{0};
  std::atomic<int> parked_{0};
};

// Never destroyed: a static destructor could run while a daemon thread computes.
std::atomic<Pool*> g_pool{nullptr};
std::once_flag g_once;

// The child has none of the parent's threads, and its copy of the mutex may be locked: it starts
// afresh and leaks the old pool.
void reset_after_fork() { g_pool.store(new Pool); }

Pool& pool() {
  std::call_once(g_once, [] {
    g_pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, reset_after_fork);
  });
  return *g_pool.load();
}

}  // namespace

void run_parallel(int num_threads, Job job, void* context) { pool().run(num_threads, job, context); }
void stop_threads() { pool().stop(); }
int num_pool_threads() { return pool().num_threads(); }

}  // namespace caudal
