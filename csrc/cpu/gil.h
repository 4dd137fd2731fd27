// Releases the interpreter lock around computation, also while the interpreter shuts down.
#pragma once

#include <nanobind/nanobind.h>

namespace caudal {

// For the lifetime of the object. A daemon thread that is still inside when the interpreter ends
// stays there: taking the lock back would make Python unwind it through C++ frames, which aborts.
class ReleaseGil {
 public:
  ReleaseGil();
  ~ReleaseGil();
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

// At interpreter exit, on the main thread with the lock held: from now on other threads do not come
// back from ReleaseGil; compute threads are joined.
void shut_down();

}  // namespace caudal
