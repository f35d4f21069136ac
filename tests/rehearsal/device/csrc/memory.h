// Memory of the device: host memory that is NaN when it is fresh and NaN again when it is freed. Freed blocks are kept for a
// while, so that whoever still has an address reads NaN, not what the next owner wrote.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstdlib>
#include <deque>

#include "guard.h"

namespace rehearsal {

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

inline void poison(void* start, size_t bytes) {
  if (bytes) std::memset(start, NAN_BYTE, bytes);
}

// The last blocks that were freed, of `KEPT` bytes at most, with the oldest in front.
class Freed {
 public:
  void take(void* start, size_t bytes) {
    poison(start, bytes);
    std::lock_guard<std::mutex> held(lock_);
    blocks_.push_back({start, bytes});
    for (bytes_ += bytes; bytes_ > KEPT; blocks_.pop_front()) {
      bytes_ -= blocks_.front().second;
      std::free(blocks_.front().first);
    }
  }

 private:
  std::mutex lock_;
  std::deque<std::pair<void*, size_t>> blocks_;
  size_t bytes_ = 0;
};

inline Freed& freed() {
  static auto* freed = new Freed();  // never destroyed: tensors may outlive everything else
  return *freed;
}

// Memory in use, of the stream on which it was allocated. Others that are recorded keep it from a next owner until they are done.
class Block {
 public:
  Past past;
  std::vector<size_t> recorded;

  Block(void* start, size_t bytes, c10::Device device, c10::Storage made = {})
      : start_(start), bytes_(bytes), made_(std::move(made)), stream_(current_stream(device)) {
    counters.add(static_cast<int64_t>(bytes));
    auto known = streams.mark(stream_).clock;
    std::lock_guard<std::mutex> held(races);
    past.accesses = orphans().of(Streams::place(stream_), known);
  }
  ~Block() {
    counters.add(-static_cast<int64_t>(bytes_));
    {
      auto known = streams.mark(stream_).clock;
      std::lock_guard<std::mutex> held(races);
      orphans().add(Streams::place(stream_), past, known, recorded);
    }
    if (!made_ && bytes_) freed().take(start_, bytes_);
    if (made_ && made_.use_count() == 1) poison(start_, bytes_);
  }

  static void release(void* context) { delete static_cast<Block*>(context); }
  static Block* of(const c10::DataPtr& memory) { return memory.cast_context<Block>(&release); }

 private:
  void* start_;
  size_t bytes_;
  c10::Storage made_;  // by a kernel of the host, in its memory
  c10::Stream stream_;
};

inline void record_stream(const c10::DataPtr& memory, c10::Stream stream) {
  auto* block = Block::of(memory);
  std::lock_guard<std::mutex> held(races);
  if (block) block->recorded.push_back(Streams::place(stream));
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    c10::Device device(CUDA, current_device);
    if (bytes) {
      TORCH_CHECK(posix_memalign(&start, 512, bytes) == 0, "CUDA out of memory: ", bytes, " bytes of host memory");
      poison(start, bytes);
    }
    return {start, new Block(start, bytes, device), &Block::release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline Memory memory;
inline bool registered_memory = (c10::SetAllocator(CUDA, &memory, 10), true);

}  // namespace rehearsal
