// The same memory under another device: tensors of the device as tensors of the host, for kernels of a CPU, and back.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace rehearsal {

using at::Tensor;

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

// A tensor over `storage` with the sizes, strides and offset of `like`.
inline Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

inline size_t bytes_needed(const Tensor& tensor) {
  return at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
}

// As a tensor of the host, which keeps the memory alive. `reads` is false for operators that only look at sizes.
// Raises where the storage was freed below the tensor: on a GPU that is an illegal access, or another tensor's memory.
inline Tensor on_host(const Tensor& tensor, bool reads = true) {
  if (!on_device(tensor)) return tensor;
  const auto& storage = tensor.storage();
  TORCH_CHECK(
      !reads || bytes_needed(tensor) <= storage.nbytes(),
      "use after free: a tensor of ", bytes_needed(tensor), " bytes is used whose storage has ", storage.nbytes());
  auto* keep = new c10::Storage(storage);
  c10::DataPtr data(
      storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  auto host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return over(c10::Storage(std::move(host)), tensor, c10::DispatchKey::CPU);
}

// What a kernel of the host made, as memory of the device: counted, and NaN once it is freed.
inline Tensor as_made_on_device(const Tensor& result, c10::DeviceIndex index) {
  const auto& storage = result.storage();
  c10::Device device(CUDA, index);
  auto* block = new Block(storage.mutable_data(), storage.nbytes(), device, storage);
  c10::DataPtr data(storage.mutable_data(), block, &Block::release, device);
  auto ours = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), &memory, true);
  return over(c10::Storage(std::move(ours)), result, c10::DispatchKey::CUDA);
}

// A view of `base`: the storage itself is shared, so that freeing it frees what all views see.
inline Tensor view_like(const Tensor& base, const Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

}  // namespace rehearsal
