// The current device and streams, and events: what torch and its autograd engine ask of a device.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "late.h"

namespace rehearsal {

inline std::atomic<c10::DeviceIndex> device_count{1};

void record_stream(const c10::DataPtr& memory, c10::Stream stream);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }

  c10::Device getDevice() const override { return {CUDA, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, whole(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return streams.next(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return streams.next(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Mark();
    *static_cast<Mark*>(*event) = streams.mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override { streams.wait(stream, static_cast<Mark*>(event)->clock); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override { record_stream(memory, stream); }

  // All is over by now; who asks knows it from then on.
  bool queryStream(const c10::Stream& stream) const override {
    host_learns(streams.mark(stream).clock);
    return true;
  }
  bool queryEvent(void* event) const override {
    host_learns(static_cast<Mark*>(event)->clock);
    return true;
  }

  // The device stands still with the host, unless operators were queued behind the event.
  void synchronizeEvent(void* event) const override {
    auto* mark = static_cast<Mark*>(event);
    host_waits(queued > mark->after ? "event with work behind it" : "synchronize", mark->clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits("synchronize", streams.mark(stream).clock); }
  void synchronizeDevice(c10::DeviceIndex device) const override { host_waits("synchronize", streams.all({CUDA, device})); }
};

inline c10::impl::DeviceGuardImplRegistrar registered_guard(CUDA, new Guard());

}  // namespace rehearsal
