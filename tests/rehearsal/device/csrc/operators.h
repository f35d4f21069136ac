// Operators that have to know that memory is the device's: those that allocate, copy, look at it from the host, or make views.
#pragma once

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch.h"

namespace rehearsal {

using at::IntArrayRef;
using at::ScalarType;

// ---- memory ----

inline Tensor empty(
    IntArrayRef size, std::optional<ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(at::Device(CUDA, current_device)));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type.value_or(at::get_default_dtype_as_scalartype()), format);
}

inline Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(at::Device(CUDA, current_device)));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type.value_or(at::get_default_dtype_as_scalartype()));
}

// The storage afterwards has other memory: what both sizes have is copied, what was is poisoned.
inline void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  if (bytes == storage.nbytes()) return;
  c10::DeviceGuard guard(storage.device());
  auto fresh = memory.allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) {
    Launch launch("aten::resize_", storage.device());
    launch.uses(storage.data_ptr(), kept, false);
    launch.uses(fresh, kept, true);
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

inline const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  auto& storage = *self.storage().unsafeGetStorageImpl();
  if (needed > storage.nbytes()) resize_storage(storage, needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_storage(
    Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_keep_dtype(std::move(storage));
  if (!stride.empty() || size.empty()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

inline Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

// ---- between host and device ----

// The memory itself is copied; else one side is first brought into another dtype or order.
inline bool as_it_is(const Tensor& to, const Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.is_non_overlapping_and_dense() &&
         to.strides() == from.strides();
}

inline void copy_from_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  Launch launch("aten::copy_", to.device());
  const bool pinned = as_it_is(to, from) && Pinned::holds(from.const_data_ptr());  // other memory is read at once
  if (pinned) launch.reads(from);
  launch.writes(to);
  if (pinned) late().bring(from.const_data_ptr(), from.nbytes());
  on_host(to).copy_(from);
  if (pinned) late().to_device(launch.when, from.const_data_ptr(), from.nbytes());
  if (!non_blocking) host_waits_here("host to device", to.device());
}

// Waits also where it may run on, if it does not fill pinned memory.
inline void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  Launch launch("aten::copy_", from.device());
  launch.reads(from);
  launch.writes(to);
  to.copy_(on_host(from));
  if (non_blocking && (to.is_contiguous() || as_it_is(to, from)) && Pinned::holds(to.const_data_ptr()))
    late().to_host(launch.when, to.mutable_data_ptr(), to.nbytes());
  else
    host_waits_here("device to host", from.device());
}

// On the stream of the source; the other device waits before and after.
inline void copy_within(const Tensor& to, const Tensor& from) {
  auto stream = current_stream(from.device()), other = current_stream(to.device());
  if (stream != other) streams.wait(stream, other);
  Launch launch("aten::copy_", stream);
  launch.reads(from);
  launch.writes(to);
  on_host(to).copy_(on_host(from));
  if (stream != other) streams.wait(other, stream);
}

inline Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.numel()) return self;
  if (!on_device(from)) copy_from_host(self, from, non_blocking);
  else if (!on_device(self)) copy_to_host(self, from, non_blocking);
  else copy_within(self, from);
  return self;
}

inline at::Scalar item(const Tensor& self) {
  Launch("aten::item", self.device()).reads(self);
  host_waits_here("item", self.device());
  return at::_local_scalar_dense(on_host(self));
}

inline bool is_pinned(const Tensor&, std::optional<at::Device>) { return false; }
inline void record(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// ---- views ----

inline Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = view_like(self, self);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}
inline Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return rehearsal::as_strided(self, size, stride, std::nullopt);
}
inline Tensor view(const Tensor& self, IntArrayRef size) { return view_like(self, on_host(self, false).view(size)); }
inline Tensor view_as_type(const Tensor& self, ScalarType type) { return view_like(self, on_host(self, false).view(type)); }
inline Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return view_like(self, on_host(self, false).unfold(dimension, size, step));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("is_pinned", is_pinned);
  library.impl("record_stream", record);
  library.impl("as_strided", rehearsal::as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("view.dtype", view_as_type);
  library.impl("unfold", unfold);
}

}  // namespace rehearsal
