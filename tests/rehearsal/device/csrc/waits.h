// Host waits: moments at which a program that uses a GPU stops until the device has caught up. They are told to a listener
// (Python, see module.cpp), which knows the line of source that waits.
#pragma once

#include <atomic>

namespace rehearsal {

using WaitListener = void (*)(const char* kind);

inline std::atomic<WaitListener> wait_listener{nullptr};

inline void host_waits(const char* kind) {
  if (auto listener = wait_listener.load()) listener(kind);
}

// Operators so far: whether anything was queued behind an event.
inline std::atomic<long> queued{0};

}  // namespace rehearsal
