// Every other operator: the CPU's kernel on aliases of the arguments. What it makes becomes memory of the device; arguments that
// it wrote stay themselves. Tensors that a CUDA kernel would refuse together are refused, and operators after which the host has
// to know a number of the device are counted as waits.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>

#include "hooks.h"
#include "operators.h"

namespace rehearsal {

using c10::IValue;

// The size of a result depends on numbers of the device, or the result is a bool of Python.
inline bool needs_numbers(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::bincount"};
  return names.count(name) > 0;
}

inline bool is_indexing(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

// Tensors in an argument: itself, those of a list, those that are there of a list of optional ones.
inline std::vector<Tensor> tensors_in(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  std::vector<Tensor> found;
  if (value.isList())
    for (const IValue& one : value.toListRef())
      if (one.isTensor()) found.push_back(one.toTensor());
  return found;
}

// Arguments of one call, lent to a kernel of the host.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments)
      : schema_(schema), given_(arguments.vec()), device_(the_device()), launch_(schema.name(), at::Device(CUDA, device())) {
    refuse_host_tensors();
    if (!is_view()) note_uses();
    count_waits();
  }

  // The arguments for the kernel.
  std::vector<IValue> lend() {
    std::vector<IValue> lent;
    for (size_t at = 0; at < given_.size(); ++at) lent.push_back(lend(given_[at], schema_.arguments()[at]));
    return lent;
  }

  // What the caller gets for a result of the kernel.
  IValue returned(const IValue& result) {
    if (result.isTensor()) return returned(result.toTensor());
    if (!result.isTensorList()) return result;
    std::vector<Tensor> list;
    for (const Tensor& tensor : result.toTensorVector()) list.push_back(returned(tensor));
    return list;
  }

 private:
  struct Lent {
    Tensor ours, host;
  };

  Tensor lend(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    lent_.push_back({tensor, on_host(tensor)});
    return lent_.back().host;
  }

  IValue lend(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return lend(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(lend(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == CUDA) return at::Device(at::kCPU);
    if (value.isGenerator() && value.toGenerator().device().type() == CUDA) return host_of(value.toGenerator());
    static const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());
    if (value.isNone() && *argument.type() == *optional_generator)
      return host_of(at::detail::getCUDAHooks().getDefaultGenerator(device()));
    return value;
  }

  Tensor returned(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& lent : lent_) {
      if (!lent.host.is_same(result)) continue;
      auto* impl = lent.ours.unsafeGetTensorImpl();
      if (lent.ours.storage().data() != result.storage().data())  // an `out` that the kernel made larger
        impl->set_storage_keep_dtype(made(result).storage());
      if (lent.ours.sizes() != result.sizes() || lent.ours.strides() != result.strides())
        impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return lent.ours;
    }
    for (auto& lent : lent_)
      if (result.numel() && lent.ours.storage().data() == result.storage().data()) return view_like(lent.ours, result);
    return made(result);
  }

  Tensor made(const Tensor& result) {
    auto ours = as_made_on_device(result, device());
    launch_.writes(ours);
    return ours;
  }

  // The one device of all tensors.
  std::optional<c10::DeviceIndex> the_device() const {
    std::optional<c10::DeviceIndex> found;
    for (const auto& argument : given_)
      for (const auto& tensor : tensors_in(argument))
        if (on_device(tensor)) {
          TORCH_CHECK(
              !found || *found == tensor.device().index(),
              "Expected all tensors to be on the same device, but found ", at::Device(CUDA, *found), " and ", tensor.device(), " in ",
              schema_.name());
          found = tensor.device().index();
        }
    return found;
  }

  bool is_view() const {
    for (const auto& result : schema_.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
  }

  void note_uses() const {
    for (size_t at = 0; at < given_.size(); ++at) {
      const auto* alias = schema_.arguments()[at].alias_info();
      for (const auto& tensor : tensors_in(given_[at]))
        if (on_device(tensor)) alias && alias->isWrite() ? launch_.writes(tensor) : launch_.reads(tensor);
    }
  }

  // A kernel of CUDA takes single numbers from the host, and indices; nothing else.
  void refuse_host_tensors() const {
    if (is_indexing(schema_.name())) return;
    for (const auto& argument : given_)
      for (const auto& tensor : tensors_in(argument))
        TORCH_CHECK(
            !device_ || !tensor.defined() || on_device(tensor) || tensor.dim() == 0 || tensor.numel() == 0,
            "Expected all tensors to be on the same device, but found ", at::Device(CUDA, *device_), " and cpu in ", schema_.name());
  }

  void count_waits() const {
    const auto& name = schema_.name();
    auto waits = [&](const char* kind) { host_waits_here(kind, at::Device(CUDA, device())); };
    if (needs_numbers(name)) waits(name.c_str() + 6);
    if (name == "aten::repeat_interleave" && given_.back().isNone()) waits("repeat_interleave");
    if (!is_indexing(name) || name.find("put") == std::string::npos) return;  // `index` moves its own by operators that count
    const bool fills = given_[2].toTensor().numel() == 1 && !on_device(given_[2].toTensor());
    for (const auto& index : tensors_in(given_[1])) {
      if (!index.defined()) continue;
      if (!on_device(index) && index.dim() > 0) waits("index on the host");
      if (on_device(index) && index.scalar_type() == at::kBool && !fills) waits("index by a mask");
    }
  }

  c10::DeviceIndex device() const { return device_.value_or(current_device); }
  static at::Generator host_of(const at::Generator& generator) {
    return static_cast<Random*>(generator.unsafeGetGeneratorImpl())->host;
  }

  const c10::FunctionSchema& schema_;
  std::vector<IValue> given_;
  std::optional<c10::DeviceIndex> device_;
  Launch launch_;
  std::vector<Lent> lent_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = schema.arguments().size(), results = schema.returns().size();
  try {
    Call call(schema, torch::jit::last(*stack, arguments));
    auto lent = call.lend();
    torch::jit::drop(*stack, arguments);
    stack->insert(stack->end(), lent.begin(), lent.end());
    lent.clear();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto at = stack->end() - static_cast<int64_t>(results); at != stack->end(); ++at) *at = call.returned(*at);
  } catch (c10::Error& error) {
    error.add_context("in " + schema.name() + " on a device of the rehearsal");
    throw;
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// These have a kernel for CUDA, and a formula for all other devices, which looks at tensors from the host.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace rehearsal
