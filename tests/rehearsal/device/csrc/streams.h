// Streams, as what each of them knows. Operators run at once, in the order in which they are called, but a program may only rely
// on the order that it asked for. So every stream has a clock: how much of each stream is over when its next operator starts. It
// learns by waiting for an event, and from the host, which knows what it has waited for itself.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "waits.h"

namespace rehearsal {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t DEVICES = 64;
constexpr size_t POOL = 32;  // streams of a device; the next one is the first again, as on a GPU

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, DEVICES> current_streams{};

// One operator on a stream: the `time`-th there.
struct Moment {
  size_t stream;
  uint64_t time;
};

class Clock {
 public:
  bool knows(Moment moment) const { return moment.stream < over_.size() && moment.time <= over_[moment.stream]; }
  void learn(const Clock& other) {
    if (over_.size() < other.over_.size()) over_.resize(other.over_.size());
    std::transform(other.over_.begin(), other.over_.end(), over_.begin(), over_.begin(), [](auto a, auto b) { return std::max(a, b); });
  }
  Moment tick(size_t stream) {
    if (over_.size() <= stream) over_.resize(stream + 1);
    return {stream, ++over_[stream]};
  }

 private:
  std::vector<uint64_t> over_;
};

// What an event holds: its stream's knowledge when it was recorded, and how many operators there were by then.
struct Mark {
  Clock clock;
  long after;
};

inline c10::Device whole(c10::Device device) { return {CUDA, device.has_index() ? device.index() : current_device}; }
inline c10::Stream current_stream(c10::Device device) {
  device = whole(device);
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
}

class Streams {
 public:
  // From the pool of a device.
  c10::Stream next(c10::Device device) {
    device = whole(device);
    std::lock_guard<std::mutex> held(lock_);
    auto& [given, pool] = pools_[device.index()];
    if (pool.size() < POOL) {
      pool.push_back(static_cast<c10::StreamId>(DEVICES + device_of_.size()));
      device_of_.push_back(device.index());
    }
    return c10::Stream(c10::Stream::UNSAFE, device, pool[given++ % POOL]);
  }

  // A new operator, and what it knows to be over: all before it on its stream, too.
  std::pair<Moment, Clock> launch(c10::Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    ++queued;
    auto& clock = known_to(stream);
    auto when = clock.tick(place(stream));
    return {when, clock};
  }
  Mark mark(c10::Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    return {known_to(stream), queued};
  }
  void wait(c10::Stream stream, const Clock& clock) {
    std::lock_guard<std::mutex> held(lock_);
    known_to(stream).learn(clock);
  }
  void wait(c10::Stream stream, c10::Stream other) { wait(stream, mark(other).clock); }

  void host_learns(const Clock& clock) {
    std::lock_guard<std::mutex> held(lock_);
    host_.learn(clock);
    ++lessons_;
  }
  Clock host() {
    std::lock_guard<std::mutex> held(lock_);
    return host_;
  }
  // All that was queued on a device.
  Clock all(c10::Device device) {
    std::lock_guard<std::mutex> held(lock_);
    Clock clock;
    for (auto& [place, state] : states_)
      if (device_at(place) == device.index()) clock.learn(state.clock);
    return clock;
  }

  static size_t place(c10::Stream stream) { return stream.id() ? stream.id() : stream.device_index(); }
  std::string name(size_t place) const {
    auto device = " of cuda:" + std::to_string(device_at(place));
    return place < DEVICES ? "the default stream" + device : "stream " + std::to_string(place - DEVICES + 1) + device;
  }

 private:
  struct State {
    Clock clock;
    uint64_t lessons = 0;
  };

  Clock& known_to(c10::Stream stream) {
    auto& state = states_[place(stream)];
    if (std::exchange(state.lessons, lessons_) != lessons_) state.clock.learn(host_);
    return state.clock;
  }
  int device_at(size_t place) const { return place < DEVICES ? static_cast<int>(place) : device_of_[place - DEVICES]; }

  std::mutex lock_;
  Clock host_;
  uint64_t lessons_ = 0;
  std::map<size_t, State> states_;
  std::map<int, std::pair<size_t, std::vector<c10::StreamId>>> pools_;
  std::vector<int> device_of_;
};

inline Streams streams;

}  // namespace rehearsal
