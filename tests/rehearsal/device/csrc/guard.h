// The current device, and streams and events that have nothing to do: every operator is over when its call returns.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "waits.h"

namespace rehearsal {

constexpr auto CUDA = c10::DeviceType::CUDA;

inline thread_local c10::DeviceIndex current_device = 0;
inline std::atomic<c10::DeviceIndex> device_count{1};

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

  // One stream a device.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {CUDA, device.has_index() ? device.index() : current_device});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }

  // An event is only a mark that it was recorded.
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    static char recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void synchronizeEvent(void*) const override { host_waits("synchronize"); }
  void synchronizeStream(const c10::Stream&) const override { host_waits("synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { host_waits("synchronize"); }
};

inline c10::impl::DeviceGuardImplRegistrar registered_guard(CUDA, new Guard());

}  // namespace rehearsal
