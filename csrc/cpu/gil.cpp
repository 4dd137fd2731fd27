#include "gil.h"

#include <unistd.h>

#include <atomic>
#include <thread>

#include "thread_pool.h"

namespace caudal {
namespace {

std::atomic<bool> g_is_shutting_down{false};
std::atomic<int> g_num_returning{0};  // threads on their way from the check to the lock
std::thread::id g_main_thread;        // written before g_is_shutting_down

[[noreturn]] void stay() {
  for (;;) pause();
}

}  // namespace

ReleaseGil::ReleaseGil() : state_(PyEval_SaveThread()) {}

ReleaseGil::~ReleaseGil() {
  g_num_returning.fetch_add(1);
  if (g_is_shutting_down.load() && std::this_thread::get_id() != g_main_thread) {
    g_num_returning.fetch_sub(1);
    stay();
  }
  PyEval_RestoreThread(state_);
  g_num_returning.fetch_sub(1);
}

void shut_down() {
  g_main_thread = std::this_thread::get_id();
  g_is_shutting_down.store(true);
  const ReleaseGil release;
  while (g_num_returning.load() != 0) std::this_thread::yield();
  stop_threads();
}

}  // namespace caudal
