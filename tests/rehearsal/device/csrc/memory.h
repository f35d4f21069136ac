// Memory of the device: host memory that is NaN when it is fresh and NaN again when it is freed. Freed blocks are kept for a
// while, so that whoever still has an address reads NaN, not what the next owner wrote.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "guard.h"

namespace rehearsal {

constexpr int NAN_BYTE = 0xFF;  // NaN in every floating-point type, -1 in integers
constexpr size_t KEPT = size_t(32) << 20;

struct Counters {
  std::atomic<int64_t> allocated{0}, peak{0};

  void add(int64_t bytes) {
    auto now = allocated += bytes;
    for (auto before = peak.load(); now > before && !peak.compare_exchange_weak(before, now);) {
    }
  }
};

inline Counters counters;

struct Block {
  void* start;
  size_t bytes;
};

inline void poison(void* start, size_t bytes) {
  if (bytes) std::memset(start, NAN_BYTE, bytes);
}

// The last blocks that were freed, of `KEPT` bytes at most, with the oldest in front.
class Freed {
 public:
  void take(Block block) {
    poison(block.start, block.bytes);
    std::lock_guard<std::mutex> held(lock_);
    blocks_.push_back(block);
    for (bytes_ += block.bytes; bytes_ > KEPT; blocks_.pop_front()) {
      bytes_ -= blocks_.front().bytes;
      std::free(blocks_.front().start);
    }
  }

 private:
  std::mutex lock_;
  std::deque<Block> blocks_;
  size_t bytes_ = 0;
};

inline Freed& freed() {
  static auto* freed = new Freed();  // never destroyed: tensors may outlive everything else
  return *freed;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (bytes) {
      TORCH_CHECK(posix_memalign(&start, 512, bytes) == 0, "CUDA out of memory: ", bytes, " bytes of host memory");
      poison(start, bytes);
    }
    counters.add(static_cast<int64_t>(bytes));
    return {start, new Block{start, bytes}, &release, {CUDA, current_device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    counters.add(-static_cast<int64_t>(block->bytes));
    if (block->bytes) freed().take(*block);
    delete block;
  }
};

inline Memory memory;
inline bool registered_memory = (c10::SetAllocator(CUDA, &memory, 10), true);

// Page-locked host memory: ordinary memory whose addresses are known.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* start = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> held(lock());
    blocks()[start] = std::max<size_t>(bytes, 1);
    return {start, start, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  static bool holds(const void* address) {
    std::lock_guard<std::mutex> held(lock());
    auto after = blocks().upper_bound(static_cast<const char*>(address));
    if (after == blocks().begin()) return false;
    auto [start, bytes] = *--after;
    return address < start + bytes;
  }

 private:
  static void release(void* start) {
    {
      std::lock_guard<std::mutex> held(lock());
      blocks().erase(static_cast<const char*>(start));
    }
    std::free(start);
  }
  static std::mutex& lock() {
    static auto* lock = new std::mutex();
    return *lock;
  }
  static std::map<const char*, size_t>& blocks() {
    static auto* blocks = new std::map<const char*, size_t>();
    return *blocks;
  }
};

inline Pinned pinned;

}  // namespace rehearsal
