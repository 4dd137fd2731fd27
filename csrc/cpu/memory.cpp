#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace caudal {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkBytes = size_t{32} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

PageMemory::PageMemory(size_t bytes, bool use_huge_pages) {
  if (bytes == 0) return;
  // Alignment to a huge page comes from mapping one more and returning what sticks out.
  const size_t align = use_huge_pages ? kHugePage : 4096;
  bytes_ = round_up(bytes, align);
  const size_t mapped = bytes_ + (use_huge_pages ? align : 0);
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<std::byte*>(p);
  const size_t skip = round_up(reinterpret_cast<uintptr_t>(p), align) - reinterpret_cast<uintptr_t>(p);
  if (skip > 0) munmap(begin, skip);
  if (mapped - skip > bytes_) munmap(begin + skip + bytes_, mapped - skip - bytes_);
  data_ = begin + skip;
#if defined(MADV_HUGEPAGE)
  if (use_huge_pages) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
}

PageMemory::~PageMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::shared_ptr<std::byte> Arena::allocate(size_t bytes) {
  bytes = round_up(bytes, 64);
  if (chunk_ == nullptr || used_ + bytes > chunk_->size()) {
    chunk_ = std::make_shared<PageMemory>(bytes > kChunkBytes ? bytes : kChunkBytes, true);
    used_ = 0;
  }
  std::byte* p = chunk_->data() + used_;
  used_ += bytes;
  return {chunk_, p};
}

}  // namespace caudal
