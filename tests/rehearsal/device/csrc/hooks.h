// What torch asks a CUDA library: how many devices there are, their random numbers, pinned memory. torch looks for these hooks
// once, so this library has to be loaded before torch is imported.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <array>

#include "memory.h"
#include "pinned.h"

namespace rehearsal {

// Random numbers of a device are those that a CPU draws from the same seed.
struct Random final : c10::GeneratorImpl {
  at::Generator host;

  explicit Random(c10::DeviceIndex device)
      : c10::GeneratorImpl({CUDA, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the rehearsal's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the rehearsal's generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Random* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->host = host.clone();
    return copy;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  int getNumGPUs() const override { return device_count; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex current_device() const override { return current_device_(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device_(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { rehearsal::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(rehearsal::current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device_() : exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { host_waits("synchronize", streams.all({CUDA, device})); }

  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* address) const override { return Pinned::holds(address); }
  c10::Device getDeviceFromPtr(void*) const override { return {CUDA, current_device_()}; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* generators = new std::array<at::Generator, 64>();
    auto& found = generators->at(device < 0 ? current_device_() : device);
    if (!found.defined()) found = getNewGenerator(device);
    return found;
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? current_device_() : device);
  }

 private:
  static c10::DeviceIndex current_device_() { return rehearsal::current_device; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

}  // namespace rehearsal
