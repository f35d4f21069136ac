// Copies between pinned memory and a device, as late as they may be: what a copy brings is NaN to the host until the host has
// waited for it, and what a copy takes must be unchanged until then.
#pragma once

#include <cstring>
#include <list>

#include "races.h"

namespace rehearsal {

constexpr int NAN_BYTE = 0xFF;  // NaN in every floating-point type, -1 in integers

class LateCopies {
 public:
  // The bytes are where they will be; until then they are poison, also for copies that were to come before.
  void to_host(Moment when, void* memory, size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    Copy fresh{when, static_cast<char*>(memory), std::vector<char>(bytes), true};
    std::memcpy(fresh.bytes.data(), memory, bytes);
    std::memset(memory, NAN_BYTE, bytes);
    for (auto& copy : copies_) {
      auto from = std::max(copy.memory, fresh.memory), to = std::min(copy.end(), fresh.end());
      if (from < to) std::memset(copy.bytes.data() + (from - copy.memory), NAN_BYTE, to - from);
    }
    copies_.push_back(std::move(fresh));
  }

  void to_device(Moment when, const void* memory, size_t bytes) {
    auto* start = static_cast<char*>(const_cast<void*>(memory));
    std::lock_guard<std::mutex> held(lock_);
    copies_.push_back({when, start, std::vector<char>(start, start + bytes), false});
  }

  // Raises where the host changed memory that it did not know to be free for that.
  void settle(const Clock& host) {
    std::lock_guard<std::mutex> held(lock_);
    for (auto copy = copies_.begin(); copy != copies_.end();) {
      if (!host.knows(copy->when)) {
        ++copy;
        continue;
      }
      if (copy->to_host) std::memcpy(copy->memory, copy->bytes.data(), copy->bytes.size());
      if (!copy->to_host) compare(*copy);
      copy = copies_.erase(copy);
    }
    raise();
  }

  // A copy to the device reads what an earlier one, for which its stream has waited, is to bring.
  void bring(const void* memory, size_t bytes) {
    auto* start = static_cast<const char*>(memory);
    std::lock_guard<std::mutex> held(lock_);
    copies_.remove_if([&](const Copy& copy) {
      bool reads = copy.to_host && copy.memory < start + bytes && start < copy.end();
      if (reads) std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
      return reads;
    });
  }

  // Pinned memory that is freed is kept by its allocator until copies are over.
  void forget(const void* memory, size_t bytes) {
    auto* start = static_cast<const char*>(memory);
    std::lock_guard<std::mutex> held(lock_);
    copies_.remove_if([&](const Copy& copy) {
      bool here = start <= copy.memory && copy.memory < start + bytes;
      if (here && !copy.to_host) compare(copy);
      return here;
    });
  }

 private:
  struct Copy {
    Moment when;
    char* memory;
    std::vector<char> bytes;
    bool to_host;

    char* end() const { return memory + bytes.size(); }
  };

  void compare(const Copy& copy) {
    if (std::memcmp(copy.memory, copy.bytes.data(), copy.bytes.size()) == 0) return;
    fault_ = "race: the host changed pinned memory, of which a copy of " + std::to_string(copy.bytes.size()) + " bytes on " +
             streams.name(copy.when.stream) + " was still reading, and had not waited for that copy";
  }
  void raise() {
    auto fault = std::exchange(fault_, "");
    TORCH_CHECK(fault.empty(), fault);
  }

  std::mutex lock_;
  std::list<Copy> copies_;
  std::string fault_;
};

inline LateCopies& late() {
  static auto* late = new LateCopies();  // never destroyed: tensors may outlive everything else
  return *late;
}

inline void host_learns(const Clock& clock) {
  streams.host_learns(clock);
  late().settle(streams.host());
}
inline void host_waits(const char* kind, const Clock& clock) {
  host_waits(kind);
  host_learns(clock);
}
// The host waits for what it has queued on the current stream so far.
inline void host_waits_here(const char* kind, c10::Device device) { host_waits(kind, streams.mark(current_stream(device)).clock); }

}  // namespace rehearsal
