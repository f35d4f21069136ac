// One operator as a stream sees it: a moment, in which it reads and writes memory.
#pragma once

#include "alias.h"
#include "pinned.h"

namespace rehearsal {

class Launch {
 public:
  const Moment when;

  Launch(const std::string& name, c10::Stream stream) : Launch(name, streams.launch(stream)) {}
  Launch(const std::string& name, c10::Device device) : Launch(name, current_stream(device)) {}

  // These raise where others were not waited for.
  void reads(const Tensor& tensor) const { uses(tensor, false); }
  void writes(const Tensor& tensor) const { uses(tensor, true); }

  void uses(const c10::DataPtr& memory, size_t bytes, bool writes) const {
    uses(memory, reinterpret_cast<uintptr_t>(memory.get()), bytes, writes, {static_cast<int64_t>(bytes)});
  }

 private:
  Launch(const std::string& name, std::pair<Moment, Clock> launched)
      : when(launched.first), by_(interned(name)), known_(std::move(launched.second)) {}

  void uses(const Tensor& tensor, bool writes) const {
    if (!tensor.defined() || !tensor.has_storage() || !tensor.numel()) return;
    auto bytes = bytes_needed(tensor) - tensor.storage_offset() * tensor.dtype().itemsize();
    uses(tensor.storage().data_ptr(), reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), bytes, writes, tensor.sizes());
  }

  void uses(const c10::DataPtr& memory, uintptr_t from, size_t bytes, bool writes, c10::IntArrayRef shape) const {
    Access now{when, from, from + bytes, writes, by_};
    std::lock_guard<std::mutex> held(races);
    auto* block = Block::of(memory);
    auto* past = block ? &block->past : memory.device().is_cpu() ? Pinned::past(reinterpret_cast<void*>(from)) : nullptr;
    if (!past) return;
    if (auto* before = past->unordered(now, known_)) TORCH_CHECK(false, told(now, *before, shape));
    past->add(now, known_);
  }

  const std::string* by_;
  Clock known_;
};

}  // namespace rehearsal
