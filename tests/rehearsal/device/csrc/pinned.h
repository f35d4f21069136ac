// Page-locked host memory: ordinary memory whose addresses are known, and which streams use.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdlib>

#include "late.h"

namespace rehearsal {

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* start = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> held(races);
    blocks()[start] = {std::max<size_t>(bytes, 1), {}};
    return {start, start, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  // Of the block around an address; none for other memory. Guarded by `races`.
  static Past* past(const void* address) {
    auto after = blocks().upper_bound(static_cast<const char*>(address));
    if (after == blocks().begin()) return nullptr;
    auto& [start, block] = *--after;
    return address < start + block.bytes ? &block.past : nullptr;
  }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> held(races);
    return past(address) != nullptr;
  }

 private:
  struct Block {
    size_t bytes;
    Past past;
  };

  static void release(void* start) {
    size_t bytes;
    {
      std::lock_guard<std::mutex> held(races);
      bytes = blocks().extract(static_cast<const char*>(start)).mapped().bytes;
    }
    late().forget(start, bytes);
    std::free(start);
  }
  static std::map<const char*, Block>& blocks() {
    static auto* blocks = new std::map<const char*, Block>();
    return *blocks;
  }
};

inline Pinned pinned;

}  // namespace rehearsal
