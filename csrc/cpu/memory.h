// Page-aligned memory straight from the operating system: zeroed, committed when first touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace caudal {

class PageMemory {
 public:
  PageMemory() = default;
  // Throws std::bad_alloc. Huge pages are only asked for; the system may decline.
  PageMemory(size_t bytes, bool use_huge_pages);
  ~PageMemory();
  PageMemory(PageMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PageMemory& operator=(PageMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Hands out pieces of a few large mappings, so that small matrices share huge pages. A piece lives
// as long as any holder of the returned pointer. Not thread-safe.
class Arena {
 public:
  std::shared_ptr<std::byte> allocate(size_t bytes);

 private:
  std::shared_ptr<PageMemory> chunk_;
  size_t used_ = 0;
};

}  // namespace caudal
